"""[H] The side that waits for peers: who knows the token gets a session of its own."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from rl_jax.wire import frames
from rl_jax.wire.address import Listener
from rl_jax.wire.connection import HANDSHAKE_S, Connection, Errors, Methods, read_frame
from rl_jax.wire.frames import Clock

OpenSession = Callable[[Connection], AbstractAsyncContextManager[Methods]]
"""Entered when a peer has been let in, left when its connection is lost and nothing of it runs any
more: what the peer left behind is released there."""


@asynccontextmanager
async def serve(
    address: str, open_session: OpenSession, *, token: str, clock: Clock, errors: Errors
) -> AsyncIterator[str]:
    """Serves until left; yields the address, with the real port where 0 was asked for.

    An OSError names an address that is in use. `token` is what peers must say, never empty.
    """
    if not token:
        raise ValueError(f"a server at {address} needs a token")
    peers: set[asyncio.Task[None]] = set()
    numbers = itertools.count(1)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = f"client {next(numbers)} of {listener.address}"
        connection = Connection(reader, writer, name, clock, errors)
        task = asyncio.create_task(_attend(reader, writer, connection, open_session, token))
        peers.add(task)
        task.add_done_callback(peers.discard)

    listener = Listener(address)
    await listener.start(accept)
    try:
        yield listener.address
    finally:
        listener.close()
        for task in peers:
            task.cancel()
        if peers:
            await asyncio.wait(peers)


async def _attend(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    connection: Connection,
    open_session: OpenSession,
    token: str,
) -> None:
    try:
        if await _greet(reader, writer, token):
            async with open_session(connection) as methods:
                await connection.run(methods)
    finally:
        writer.close()
        with suppress(OSError):
            async with asyncio.timeout(HANDSHAKE_S):
                await writer.wait_closed()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> bool:
    """Whether the peer may come in; tells it otherwise."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            refused = frames.check_hello(await read_frame(reader, frames.MAX_HELLO), token)
    except ValueError:
        refused = frames.check_hello(None, token)
    except (asyncio.IncompleteReadError, OSError):
        return False
    writer.write(frames.welcome(refused))
    return not refused
