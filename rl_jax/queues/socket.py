"""[H] A queue that other processes share: `QueueServer` holds it, a `SocketQueue` is the way to it.

A put whose message arrived whole runs to its end, also when its connection is lost meanwhile, and
one that is sent again has the same id and joins it: a group enters once or not at all.

Admission stays a function of the one who gets. The server asks it about every group at hand and
uses each answer for one look at the queue, under the version that it was asked for; so a batch is
admitted in one instant, as it is in memory, and groups travel once for every time they are asked
about. That suits tools and tests. The trainer holds the queue and gets from it in its own process.
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from rl_jax.queues.base import UNDECIDED, Queue, QueueClosed, QueueFailed, State
from rl_jax.staleness import Admit, Decision, Drop, Take, Wait
from rl_jax.trajectories.codec import decode_group, encode_group
from rl_jax.trajectories.types import Group
from rl_jax.wire.client import Client
from rl_jax.wire.connection import Connection, ConnectionLost, Methods
from rl_jax.wire.frames import Clock, decode_error, encode_error
from rl_jax.wire.server import serve

ERRORS = (QueueFailed, QueueClosed, ValueError, TimeoutError, OSError, RuntimeError)
"""What travels as itself."""
GRACE_S = 10.0
"""How much longer than the queue itself its answer may take."""
REMEMBERED = 1 << 14
"""Puts that a server recognises when they come again."""


class QueueServer:
    """Serves `queue` to processes that know the token."""

    def __init__(self, queue: Queue, *, token: str, clock: Clock) -> None:
        self._queue, self._token, self._clock = queue, token, clock
        self._puts: dict[str, asyncio.Task[None]] = {}

    def serve(self, address: str) -> AbstractAsyncContextManager[str]:
        """`async with`: serves until left; gives the address, with the real port. OSError where it
        is in use."""
        return serve(address, self._session, token=self._token, clock=self._clock, errors=ERRORS)

    @asynccontextmanager
    async def _session(self, peer: Connection) -> AsyncIterator[Methods]:
        async def get(number: int, n: int, step: int, timeout: float) -> list[Any]:
            return await self._get(peer, number, n, step, timeout)

        async def put(id: str, group: object, timeout: float) -> None:
            await self._put(peer, id, group, timeout)

        def fail(name: str, text: str) -> None:
            self._queue.fail(decode_error(name, text, ERRORS))

        yield {
            "put": put,
            "get": get,
            "ack": self._queue.ack,
            "reconsider": self._queue.reconsider,
            "get_state": self._queue.get_state,
            "set_state": self._queue.set_state,
            "fail": fail,
            "close": self._queue.close,
        }

    async def _put(self, peer: Connection, id: str, group: object, timeout: float) -> None:
        put = self._puts.get(id)
        if put is None:
            work = self._queue.put(decode_group(group), timeout=timeout)
            put = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
            self._remember(id, put)
        try:
            await asyncio.shield(put)
        except asyncio.CancelledError:
            # By its client; where the connection was lost the group goes on into the queue.
            if not peer.lost.is_set():
                put.cancel()
            raise

    def _remember(self, id: str, put: asyncio.Task[None]) -> None:
        def forget_failure(done: asyncio.Task[None]) -> None:
            if done.cancelled() or done.exception():
                self._puts.pop(id, None)

        self._puts[id] = put
        put.add_done_callback(forget_failure)
        while len(self._puts) > REMEMBERED:
            oldest = next(iter(self._puts))
            if not self._puts[oldest].done():
                break
            del self._puts[oldest]

    async def _get(
        self, peer: Connection, number: int, n: int, step: int, timeout: float
    ) -> list[Any]:
        async def ask(groups: list[Group], published: int) -> list[Decision]:
            plain = [encode_group(g) for g in groups]
            answers = await peer.call("admit", number, plain, published, timeout=timeout + GRACE_S)
            return [_decode_decision(a) for a in answers]

        admit = _Asking(ask, self._queue.reconsider)
        try:
            groups = await self._queue.get(n, admit, step=step, timeout=timeout)
        finally:
            admit.stop()
        return [encode_group(g) for g in groups]


class _Asking:
    """An `admit` whose decisions come from elsewhere, each good for one look at the queue."""

    def __init__(
        self,
        ask: Callable[[list[Group], int], Awaitable[list[Decision]]],
        reconsider: Callable[[], None],
    ) -> None:
        self._ask, self._reconsider = ask, reconsider
        self._wanted: list[Group] = []
        self._asked: list[Group] = []
        self._asking: asyncio.Task[None] | None = None
        self._decisions: dict[tuple[int, int], Decision] = {}
        """By the group's identity and the published version."""
        self._error: Exception | None = None

    def __call__(self, group: Group, published: int) -> Decision:
        if self._error:
            raise self._error
        if self._asking is None:
            decision = self._decisions.pop((id(group), published), None)
            if decision is not None:
                return decision
            # The groups after this one in this look are asked about with it.
            self._wanted = []
            self._asking = asyncio.create_task(self._decide(published))
        self._wanted.append(group)
        return UNDECIDED

    def stop(self) -> None:
        if self._asking:
            self._asking.cancel()

    async def _decide(self, published: int) -> None:
        # This runs after the look that wanted it; later looks find it under way and want in vain.
        # The asked are kept, so that none of their identities is given to a newcomer.
        asked = self._asked = self._wanted
        self._wanted = []
        try:
            decisions = await self._ask(asked, published)
            pairs = zip(asked, decisions, strict=True)
            self._decisions = {(id(group), published): decision for group, decision in pairs}
        except Exception as error:
            self._error = error
        self._asking = None
        self._reconsider()


class SocketQueue:
    """The queue behind a `QueueServer`: a `SharedQueue`, whose state is awaited.

    What is not awaited (`ack`, `reconsider`, `fail`, `close`) keeps its place among the calls; what
    is said while there is no connection waits for the next one, what is lost with a connection is
    not said again. `put` outlives lost connections within its timeout. `get` does not: where its
    answer was lost, the groups stay with their update in the state.
    """

    def __init__(self, address: str, *, token: str, clock: Clock) -> None:
        self._client = Client(
            address,
            token=token,
            clock=clock,
            errors=ERRORS,
            methods={"admit": self._admit},
            on_connect=self._say_all,
        )
        self._unsaid: list[tuple[str, tuple[Any, ...]]] = []
        self._admits: dict[int, Admit] = {}
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Keeps a connection until cancelled."""
        await self._client.keep()

    async def disconnect(self) -> None:
        await self._client.close()

    async def put(self, group: Group, *, timeout: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline, left = clock() + timeout, timeout
        id, plain = uuid.uuid4().hex, encode_group(group)
        while True:
            connection = await self._client.connect(left)
            try:
                return await connection.call("put", id, plain, left, timeout=left + GRACE_S)
            except ConnectionLost:
                left = max(deadline - clock(), 0.0)

    async def get(self, n: int, admit: Admit, *, step: int, timeout: float) -> list[Group]:
        connection = await self._client.connect(timeout)
        number = next(self._numbers)
        self._admits[number] = admit
        try:
            got = await connection.call("get", number, n, step, timeout, timeout=timeout + GRACE_S)
        finally:
            del self._admits[number]
        return [decode_group(g) for g in got]

    def ack(self, step: int) -> None:
        self._say("ack", step)

    def reconsider(self) -> None:
        self._say("reconsider")

    async def get_state(self) -> State:
        return await (await self._client.connect(GRACE_S)).call("get_state", timeout=GRACE_S)

    async def set_state(self, state: State) -> None:
        await (await self._client.connect(GRACE_S)).call("set_state", state, timeout=GRACE_S)

    def fail(self, error: BaseException) -> None:
        self._say("fail", *encode_error(error))

    def close(self) -> None:
        self._say("close")

    def _say(self, method: str, *arguments: Any) -> None:
        connection = self._client.connection
        if connection is not None:
            connection.tell(method, *arguments)
        elif (method, arguments) not in self._unsaid:
            # Saying any of it twice changes nothing.
            self._unsaid.append((method, arguments))

    def _say_all(self, connection: Connection) -> None:
        unsaid, self._unsaid = self._unsaid, []
        for method, arguments in unsaid:
            connection.tell(method, *arguments)

    def _admit(self, number: int, groups: list[Any], published: int) -> list[Any]:
        if number not in self._admits:
            raise ValueError("nobody waits for these groups any more")
        admit = self._admits[number]
        return [_encode_decision(admit(decode_group(g), published)) for g in groups]


def _encode_decision(decision: Decision) -> list[Any]:
    match decision:
        case Take():
            return ["take"]
        case Drop(reason):
            return ["drop", reason]
        case Wait(deadline, then):
            return ["wait", float(deadline), _encode_decision(then)]


def _decode_decision(value: object) -> Decision:
    match value:
        case ["take"]:
            return Take()
        case ["drop", str(reason)]:
            return Drop(reason)
        case ["wait", float(deadline), ["take" | "drop", *_] as last]:
            then = _decode_decision(last)
            assert not isinstance(then, Wait)
            return Wait(deadline, then)
    raise ValueError(f"{value!r} is no decision on a group")
