"""[H] The side that connects, and connects again when it is asked to."""

import asyncio
from collections.abc import Callable

from rl_jax.wire import frames
from rl_jax.wire.address import dial, parse
from rl_jax.wire.connection import HANDSHAKE_S, Connection, Errors, Methods, read_frame
from rl_jax.wire.frames import Clock

RETRY_S = 0.1
"""Pause between two attempts to connect."""


class HandshakeRefused(Exception):
    """The server answered and will not talk to this client, so trying again is of no use."""


class Client:
    """At most one connection at a time to the server at `address`. `methods` are what the server
    may call back; `on_connect` has the first word on every new connection."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        clock: Clock,
        errors: Errors,
        methods: Methods,
        on_connect: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        parse(address)
        self.address = address
        self._token, self._clock = token, clock
        self._errors, self._methods = errors, methods
        self._on_connect = on_connect
        self._why = "nobody answered"
        self._dialling = asyncio.Lock()
        self._last: Connection | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def connection(self) -> Connection | None:
        """None while there is none."""
        return None if self._last is None or self._last.lost.is_set() else self._last

    async def connect(self, timeout: float) -> Connection:
        """The connection there is, without a pause, or a new one; tries for `timeout` seconds.

        TimeoutError where the server is not there until then; HandshakeRefused.
        """
        if self.connection is not None:
            return self.connection
        try:
            async with asyncio.timeout(timeout), self._dialling:
                while (connection := self.connection) is None:
                    try:
                        self._last = await self._dial()
                        self._on_connect(self._last)
                    except OSError as error:
                        self._why = str(error) or self._why
                        await asyncio.sleep(RETRY_S)
                return connection
        except TimeoutError:
            text = f"no connection to {self.address} in {timeout:g} s: {self._why}"
            raise TimeoutError(text) from None

    async def keep(self, attempt_s: float = 60.0) -> None:
        """Connects again whenever the connection is lost, until cancelled or refused."""
        while True:
            try:
                connection = await self.connect(attempt_s)
            except TimeoutError:
                continue
            await connection.lost.wait()

    async def close(self) -> None:
        """Ends the connection, once what was sent is on its way."""
        if self._last and self._reading:
            await self._last.close()
            await asyncio.wait([self._reading])

    async def _dial(self) -> Connection:
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await dial(self.address)
            try:
                writer.write(frames.hello(self._token))
                refused = frames.check_welcome(await read_frame(reader, frames.MAX_HELLO))
            except asyncio.IncompleteReadError:
                writer.transport.abort()
                raise ConnectionError("closed before it answered") from None
            except ValueError:
                refused = frames.check_welcome(None)
            except BaseException:
                writer.transport.abort()
                raise
        if refused:
            writer.transport.abort()
            raise HandshakeRefused(f"{self.address}: {refused}")
        connection = Connection(reader, writer, self.address, self._clock, self._errors)
        self._reading = asyncio.create_task(connection.run(self._methods))
        return connection
