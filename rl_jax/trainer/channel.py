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

import msgpack

from rl_jax.trajectories.codec import MAX_BYTES
from rl_jax.wire.silence import end_when_idle

LENGTH = struct.Struct(">Q")
HELLO_BYTES = 1 << 12
HELLO_S = 10.0
"""How long one who connected may take to say who it is."""
RETRY_S = 0.1


class Peer:
    """The process at the other end. Waits belong inside the caller's `asyncio.timeout`.

    What comes is read at once, also by a process that waits for nothing: an end behind what nobody
    asked for yet is noticed, and who sends never waits for who is busy. So one holds what the other
    sends ahead, a batch at most, since each batch is answered. Made inside an event loop.
    """

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        self._writer = writer
        self._came: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def gone(self) -> bool:
        """Whether its end came; what it sent before may be there to receive."""
        return self._reading.done()

    async def send(self, *frames: bytes) -> None:
        """ConnectionError where the peer is gone."""
        await _send(self._writer, self.name, *frames)

    async def receive(self) -> bytes:
        """The next frame. ConnectionError where the peer is gone and all it sent was received."""
        came = await self._came.get()
        if isinstance(came, Exception):
            self._came.put_nowait(came)
            raise came
        return came

    def close(self) -> None:
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._came.put_nowait(await _receive(reader, self.name, MAX_BYTES))
        except (ConnectionError, ValueError) as error:
            self._came.put_nowait(error)


async def _send(writer: asyncio.StreamWriter, name: str, *frames: bytes) -> None:
    try:
        for frame in frames:
            writer.write(LENGTH.pack(len(frame)))
            writer.write(frame)
            await writer.drain()
    except OSError as error:
        raise ConnectionError(f"{name} is gone") from error


async def _receive(reader: asyncio.StreamReader, name: str, most: int) -> bytes:
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if size > most:
            raise ValueError(f"{name} announces {size} bytes; at most {most} expected")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ConnectionError(f"{name} is gone") from error


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
            peer.close()


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
        name = "a newcomer"
        try:
            async with asyncio.timeout(HELLO_S):
                number = _number(await _receive(reader, name, HELLO_BYTES), token)
            if refusal := _refusal(number, peers, size):
                await _send(writer, name, refusal.encode())
                raise ValueError(refusal)
        except (ConnectionError, TimeoutError, ValueError):
            # Not one of ours, or one too many: the world goes on waiting for its own.
            writer.close()
            return
        # Data under way are watched by jax's heartbeat, which tells the busy from the gone.
        end_when_idle(writer)
        peers[number[0]] = Peer(f"process {number[0]}", reader, writer)
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
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(RETRY_S)
        else:
            end_when_idle(writer)
            return Peer("process 0", reader, writer)


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
