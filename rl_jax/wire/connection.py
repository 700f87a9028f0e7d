"""[H] A connection between two peers: each may call the other's methods, many calls at a time.

What one side sends arrives in that order, and what arrives is begun in that order: a method that
awaits nothing has taken effect before the next frame is looked at.
"""

import asyncio
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_jax.wire import frames
from rl_jax.wire.frames import Call, Cancel, Clock, Failure, Frame, Result, decode_error
from rl_jax.wire.silence import end_when_silent

Methods = Mapping[str, Callable[..., Any]]
"""What the peer may call, by name; plain functions and coroutine functions of msgpack values."""
Errors = Sequence[type[Exception]]
"""Types that are raised again as themselves where the other side raised one of that name."""

HANDSHAKE_S = 5.0
"""From connecting to the welcome."""
STALLED_S = 60.0
"""A peer that reads nothing for so long has gone."""


class ConnectionLost(ConnectionError):
    """The peer went away. Whether it carried out a call under way is not known."""


class Connection:
    """One side of it. `run` reads; nothing is answered or called back without it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        clock: Clock,
        errors: Errors,
    ) -> None:
        self.peer = peer
        self.lost = asyncio.Event()
        end_when_silent(writer)
        self._reader, self._writer = reader, writer
        self._clock, self._errors = clock, errors
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """What the peer's method returns, or raises. Cancelling this cancels it there.

        TimeoutError after `timeout` seconds, ConnectionLost at once where the connection is lost.
        """
        number = next(self._ids)
        self._send(Call(self._clock.tick(), number, method, list(arguments)))
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._drain()
                outcome = await answer
        except TimeoutError:
            text = f"{method} of {self.peer} was not answered in {timeout:g} s"
            raise TimeoutError(text) from None
        finally:
            del self._calls[number]
            if (answer.cancelled() or not answer.done()) and not self.lost.is_set():
                self._send(Cancel(self._clock.tick(), number))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def tell(self, method: str, *arguments: Any) -> None:
        """Calls without an answer, in order with all other calls; ConnectionLost where it is."""
        self._send(Call(self._clock.tick(), None, method, list(arguments)))

    async def run(self, methods: Methods) -> None:
        """Reads until the connection is lost; then all calls fail and all methods are cancelled."""
        why = "ended by the peer"
        try:
            while True:
                frame = frames.decode(await read_frame(self._reader, frames.MAX_FRAME))
                self._clock.witness(frame.clock)
                self._take(frame, methods)
        except asyncio.IncompleteReadError:
            pass
        except (OSError, ValueError) as error:
            why = str(error)
        finally:
            self._end(why)
            serving = [*self._serving.values(), *self._telling]
            for task in serving:
                task.cancel()
            if serving:
                await asyncio.wait(serving, timeout=STALLED_S)

    async def close(self) -> None:
        """Ends it when what was sent is on its way; calls under way fail."""
        self._writer.close()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self.lost.wait()
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Ends it at once; what was sent last may not arrive."""
        self._writer.transport.abort()

    def _end(self, why: str) -> None:
        self.lost.set()
        self.abort()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result(ConnectionLost(f"connection to {self.peer} lost: {why}"))

    def _send(self, frame: Frame) -> None:
        if self.lost.is_set():
            raise ConnectionLost(f"connection to {self.peer} lost")
        if not self._writer.is_closing():  # about to be found lost
            self._writer.write(frames.encode(frame))

    async def _drain(self) -> None:
        """Waits until the peer has read enough. That it is gone is for `run` to find."""
        try:
            async with asyncio.timeout(STALLED_S):
                await self._writer.drain()
        except TimeoutError:
            self.abort()
        except OSError:
            pass

    def _take(self, frame: Frame, methods: Methods) -> None:
        match frame:
            case Call():
                self._begin(frame, methods)
            case Cancel():
                task = self._serving.get(frame.id)
                if task:
                    task.cancel()
            case Result(id=number, value=value):
                self._settle(number, value)
            case Failure(id=number, name=name, text=text):
                self._settle(number, decode_error(name, text, self._errors))

    def _settle(self, number: int, outcome: Any) -> None:
        answer = self._calls.get(number)
        # Nobody waits for what was cancelled or came too late.
        if answer and not answer.done():
            answer.set_result(outcome)

    def _begin(self, call: Call, methods: Methods) -> None:
        if call.id in self._serving:
            raise ValueError(f"{self.peer} called twice as {call.id}")
        work = _perform(call, methods) if call.id is None else self._answer(call, methods)
        # Eager: it runs up to its first wait here, before the next frame is looked at.
        task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
        if task.done():
            return
        if call.id is None:
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        else:
            number = call.id
            self._serving[number] = task
            task.add_done_callback(lambda _: self._serving.pop(number))

    async def _answer(self, call: Call, methods: Methods) -> None:
        assert call.id is not None
        try:
            value = await _perform(call, methods)
            answer = frames.encode(Result(self._clock.tick(), call.id, value))
        except (Exception, asyncio.CancelledError) as error:
            answer = frames.encode(frames.failure(self._clock.tick(), call.id, error))
        if not self.lost.is_set():
            self._writer.write(answer)
            with suppress(asyncio.CancelledError):
                await self._drain()


async def _perform(call: Call, methods: Methods) -> Any:
    if call.method not in methods:
        raise ValueError(f"there is no method {call.method!r}")
    value = methods[call.method](*call.arguments)
    return await value if inspect.isawaitable(value) else value


async def read_frame(reader: asyncio.StreamReader, most: int) -> object:
    """The next frame's value; an IncompleteReadError at the end of the stream, a ValueError for
    what is no frame of at most `most` bytes."""
    header = await reader.readexactly(frames.HEADER.size)
    return frames.unpack(await reader.readexactly(frames.size(header, most)))
