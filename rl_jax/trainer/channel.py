"""[H] Connections between process 0 of a world and each other one: frames over TCP.

A frame is its length in 8 bytes and the bytes. Whoever connects proves itself by a token. The
connections are not encrypted: the world's network is trusted, as jax's own collectives trust it.
"""

import asyncio
import errno
import hmac
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgpack

LENGTH = struct.Struct(">Q")
HELLO_BYTES = 1 << 12
HELLO_S = 10.0
"""How long one who connected may take to say who it is."""
TEXT_BYTES = 1 << 20
RETRY_S = 0.1


class Peer(NamedTuple):
    """The process at the other end. Waits belong inside the caller's `asyncio.timeout`."""

    name: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *frames: bytes) -> None:
        """ConnectionError where the peer is gone."""
        try:
            for frame in frames:
                self.writer.write(LENGTH.pack(len(frame)))
                self.writer.write(frame)
                await self.writer.drain()
        except OSError as error:
            raise ConnectionError(f"{self.name} is gone") from error

    async def receive(self, most: int = TEXT_BYTES) -> bytes:
        """The next frame, of at most `most` bytes. ConnectionError where the peer is gone."""
        try:
            (size,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            if size > most:
                raise ValueError(f"{self.name} announces {size} bytes; at most {most} expected")
            return await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionError(f"{self.name} is gone") from error


@asynccontextmanager
async def connected(
    address: str, token: str, process_id: int, size: int, *, deadline_s: float
) -> AsyncIterator[tuple[Peer, ...]]:
    """On process 0 the peers 1 to size - 1 in order; elsewhere process 0 alone.

    Process 0 listens at `address` ("host:port") until all are there. TimeoutError, saying who is
    missing, after `deadline_s` seconds.
    """
    peers: dict[int, Peer] = {}
    try:
        try:
            async with asyncio.timeout(deadline_s):
                if process_id == 0:
                    await _meet_all(peers, address, token, size)
                else:
                    peers[0] = await _reach(address)
                    await _introduce(peers[0], token, process_id, size)
        except TimeoutError as error:
            raise TimeoutError(_missing(peers, address, process_id, size, deadline_s)) from error
        yield tuple(peers[number] for number in sorted(peers))
    finally:
        for peer in peers.values():
            peer.writer.close()


def _missing(
    peers: dict[int, Peer], address: str, process_id: int, size: int, deadline_s: float
) -> str:
    if process_id == 0:
        absent = ", ".join(str(n) for n in range(1, size) if n not in peers)
        return f"of {size} processes, {absent} did not come to {address} within {deadline_s:g} s"
    what = "did not begin the world" if peers else "is not there"
    return f"process 0 at {address} {what} within {deadline_s:g} s"


async def _meet_all(peers: dict[int, Peer], address: str, token: str, size: int) -> None:
    complete = asyncio.Event()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        newcomer = Peer("a newcomer", reader, writer)
        try:
            async with asyncio.timeout(HELLO_S):
                number = _number(await newcomer.receive(HELLO_BYTES), token)
            if refusal := _refusal(number, peers, size):
                await newcomer.send(refusal.encode())
                raise ValueError(refusal)
        except (ConnectionError, TimeoutError, ValueError):
            # Not one of ours, or one too many: the world goes on waiting for its own.
            writer.close()
            return
        peers[number[0]] = newcomer._replace(name=f"process {number[0]}")
        if len(peers) == size - 1:
            complete.set()

    host, port = split(address)
    server = await asyncio.start_server(meet, host, port)
    try:
        if size > 1:
            await complete.wait()
    finally:
        server.close()
    for peer in peers.values():
        await peer.send(b"")


def _number(hello: bytes, token: str) -> tuple[int, int]:
    """(process id, size of the world) of who knows the token."""
    try:
        given, number, size = msgpack.unpackb(hello)
        known = hmac.compare_digest(given.encode(), token.encode())
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise ValueError("no hello") from error
    if not known or type(number) is not int or type(size) is not int:
        raise ValueError("a hello without the token")
    return number, size


def _refusal(number: tuple[int, int], peers: dict[int, Peer], size: int) -> str:
    """Why it may not join; empty where it may."""
    own, of = number
    if of != size or not 0 < own < size:
        return f"process {own} of {of} does not belong to a world of {size}"
    return f"process {own} is there already" if own in peers else ""


async def _reach(address: str) -> Peer:
    """Process 0, as soon as it listens."""
    host, port = split(address)
    while True:
        try:
            return Peer("process 0", *await asyncio.open_connection(host, port))
        except OSError:
            await asyncio.sleep(RETRY_S)


async def _introduce(leader: Peer, token: str, process_id: int, size: int) -> None:
    await leader.send(msgpack.Packer().pack([token, process_id, size]))
    try:
        refusal = await leader.receive()
    except ConnectionError as error:
        raise ConnectionError("process 0 is gone, or does not take this token") from error
    if refusal:
        raise ValueError(f"process 0 refuses: {refusal.decode()}")


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there; OSError where the host is not this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'{address!r} is no address; "host:port" expected')
    return host.strip("[]"), int(port)
