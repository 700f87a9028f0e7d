"""Servers and clients of a test, and raw streams for those who speak out of turn."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from rl_jax.wire import frames
from rl_jax.wire.address import dial
from rl_jax.wire.client import Client
from rl_jax.wire.connection import Connection, read_frame
from rl_jax.wire.server import serve
from tests.fakes.ticks import Ticks

TOKEN = "secret"


class Known(Exception):
    """In the table of both sides."""


ERRORS = (ValueError, Known)


def served(
    address: str, methods: Mapping[str, Callable[..., Any]], clock: Ticks | None = None
) -> AbstractAsyncContextManager[str]:
    """A server with these methods for everybody."""

    @asynccontextmanager
    async def session(peer: Connection) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
        yield methods

    return serve(address, session, token=TOKEN, clock=clock or Ticks(), errors=ERRORS)


@asynccontextmanager
async def connected(
    address: str, methods: Mapping[str, Callable[..., Any]] | None = None, **rest: Any
) -> AsyncIterator[Connection]:
    client = made(address, methods=methods or {}, **rest)
    yield await client.connect(5)
    await client.close()


def made(address: str, **changed: Any) -> Client:
    given = {"token": TOKEN, "clock": Ticks(), "errors": ERRORS, "methods": {}} | changed
    return Client(address, **given)


async def say(address: str, *sent: bytes) -> list[Any]:
    """Every frame that the server answers until it closes; the client closes after its last."""
    reader, writer = await dial(address)
    for data in sent:
        writer.write(data)
    writer.write_eof()
    heard = []
    try:
        while True:
            heard.append(await read_frame(reader, frames.MAX_FRAME))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        writer.close()
        return heard
