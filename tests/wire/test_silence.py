"""Sockets that notice a peer that vanished; tests/drills/test_apart.py cuts a real network."""

import asyncio
import socket
from pathlib import Path

from rl_jax.wire.address import dial
from rl_jax.wire.connection import STALLED_S, Connection
from rl_jax.wire.silence import IDLE_S, SILENT_S, end_when_idle, end_when_silent
from tests.fakes.ticks import Ticks
from tests.wire.peers import served


async def made(address: str) -> socket.socket:
    """The socket under a connection."""
    async with served(address, {}) as where:
        reader, writer = await dial(where)
        Connection(reader, writer, where, Ticks(), ())
        own = writer.get_extra_info("socket")
        copy = socket.fromfd(own.fileno(), own.family, own.type)
        writer.close()
        return copy


def watched(own: socket.socket) -> tuple[int, int]:
    """(seconds of silence that end it while it is idle, with data under way)."""
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    first, every, count, unread = (
        own.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    )
    return first + every * count, unread // 1000


def test_a_connection_over_a_network_is_watched() -> None:
    with asyncio.run(made("tcp:127.0.0.1:0")) as own:
        assert watched(own) == (SILENT_S, SILENT_S)


def test_the_kernel_does_not_end_what_a_connection_still_waits_for() -> None:
    """It takes who reads nothing for who is gone."""
    assert SILENT_S > STALLED_S


def test_an_idle_end_says_nothing_of_data_under_way() -> None:
    async def run() -> None:
        async with served("tcp:127.0.0.1:0", {}) as where:
            _, writer = await dial(where)
            end_when_idle(writer)
            assert watched(writer.get_extra_info("socket")) == (IDLE_S, 0)
            writer.close()

    asyncio.run(run())


def test_a_connection_that_ended_meanwhile_is_left_to_who_reads_it() -> None:
    async def run() -> None:
        async with served("tcp:127.0.0.1:0", {}) as where:
            reader, writer = await dial(where)
            writer.transport.abort()
            assert await reader.read() == b""
            end_when_idle(writer)
            end_when_silent(writer)

    asyncio.run(run())


def test_a_connection_on_the_machine_is_left_alone(tmp_path: Path) -> None:
    with asyncio.run(made(f"unix:{tmp_path / 's'}")) as own:
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
