"""[H] Records in append-only files: their framing, and a writer that answers when they are durable.

A file is records end to end; a record is length (uint32), CRC32 of the payload (uint32), both
little-endian, and the payload, a msgpack map whose first key is "kind".
"""

import asyncio
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

MAX_RECORD = 1 << 30
"""Bytes of one payload."""

LOOKS, LOOK_S = 10, 0.02
"""How often a lock is asked for before it counts as another's, and the seconds between."""

_HEADER = struct.Struct("<II")
_FIRST_KEY = msgpack.Packer().pack("kind")


def encode_record(event: Mapping[str, Any]) -> bytes:
    """One record; a ValueError where "kind" is not the first key or the payload is too large."""
    if next(iter(event), None) != "kind":
        raise ValueError(f"a record begins with its kind, not with {next(iter(event), None)!r}")
    payload: bytes = msgpack.Packer().pack(event)
    if len(payload) > MAX_RECORD:
        raise ValueError(f"a record of {len(payload)} bytes; at most {MAX_RECORD}")
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def unpack(payload: bytes) -> dict[str, Any]:
    """The map of a payload."""
    return msgpack.unpackb(payload, strict_map_key=True)


class Scan(NamedTuple):
    """What a file of records holds."""

    payloads: list[bytes]
    end: int
    """Where the last whole record ends."""
    size: int


def scan(path: Path, *, may_be_cut: bool) -> Scan:
    """The whole records of a file; reads only.

    A ValueError names file and offset of a record that is broken with whole ones after it, or, of
    a file that may not be cut, of any that is broken.
    """
    data = path.read_bytes()
    payloads: list[bytes] = []
    offset = 0
    while (payload := _record_at(data, offset)) is not None:
        payloads.append(payload)
        offset += _HEADER.size + len(payload)
    if offset < len(data) and (not may_be_cut or _record_follows(data, offset)):
        raise ValueError(f"{path} is corrupt at byte {offset}: a record does not match its CRC")
    return Scan(payloads, offset, len(data))


class Appender:
    """Appends records to files, in the order of the calls, and never blocks the event loop.

    Records in line share one fsync. Once a write failed, everything in line and every later append
    fails: what lies on disk after a failed fsync is unknown.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        """`timeout` bounds one write, in seconds."""
        self._timeout = timeout
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._waiting: list[tuple[Path | None, bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._failed: tuple[Path | None, BaseException] | None = None
        self._closed = False

    def append(self, path: Path, record: bytes) -> asyncio.Future[None]:
        """Puts a record for the file `path` in line; await for durability. A file is opened at its
        first record, made where it is missing, and closed at the first record of another one."""
        return self._enqueue(path, record)

    def flush(self) -> asyncio.Future[None]:
        """Done when everything that is now in line is durable."""
        return self._enqueue(None, b"")

    def fail(self, path: Path | None, error: BaseException) -> None:
        """Everything in line and every later append fails: `path` cannot be written."""
        self._failed = self._failed or (path, error)

    def check(self) -> None:
        """An OSError that names file and cause where writing failed."""
        if self._failed is not None:
            path, error = self._failed
            text = f"{type(error).__name__}: {error}"
            raise OSError(f"{path} cannot be written ({text})") from error

    async def close(self) -> None:
        """Writes what is in line, then closes the file; raises where writing failed."""
        self._closed = True
        if self._writer is not None:
            await self._writer
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self.fail(self._path, error)
        self.check()

    def open(self, path: Path) -> None:
        """Goes on in the file `path`, on the calling thread."""
        if self._file is not None:
            self._sync()
            self._file.close()
        self._path = path
        self._file = path.open("ab")
        sync_directory(path.parent)

    def _enqueue(self, path: Path | None, record: bytes) -> asyncio.Future[None]:
        if self._closed:
            raise ValueError(f"{path or self._path} is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        # An append that nobody awaits is allowed; its failure shows in the next one.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        if self._failed is not None:
            self._answer(future)
            return future
        self._waiting.append((path, record, future))
        if self._writer is None:
            self._writer = loop.create_task(self._drain())
        return future

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                async with asyncio.timeout(self._timeout):
                    await asyncio.to_thread(self._write, batch)
            except Exception as error:
                self.fail(self._path, error)
            if self._failed is not None:
                batch += self._waiting
                self._waiting = []
            for _, _, future in batch:
                self._answer(future)
        self._writer = None

    def _answer(self, future: asyncio.Future[None]) -> None:
        if future.done():
            return
        try:
            self.check()
        except OSError as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _write(self, batch: list[tuple[Path | None, bytes, Any]]) -> None:
        for path, record, _ in batch:
            if path is None:
                continue
            if path != self._path:
                self.open(path)
            assert self._file is not None
            self._file.write(record)
        self._sync()

    def _sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def lock(path: Path) -> int:
    """Holds a file or directory for this process, until the descriptor is closed or the process
    ends; a ValueError where another holds it. Who only looks whether it is held lets it go soon."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(LOOK_S)
    os.close(descriptor)
    raise ValueError(f"{path} is being written by another process")


def _record_at(data: bytes, offset: int) -> bytes | None:
    """The payload of a whole record that starts at `offset`."""
    start = offset + _HEADER.size
    if offset < 0 or start > len(data):
        return None
    length, crc = _HEADER.unpack_from(data, offset)
    payload = data[start : start + length]
    # Empty is what a tail of zeros would be read as.
    if not 0 < length <= min(MAX_RECORD, len(data) - start) or zlib.crc32(payload) != crc:
        return None
    return payload


def _record_follows(data: bytes, offset: int) -> bool:
    """Whether a whole record begins somewhere after `offset`: then the one there is no cut tail.

    A damaged length hides where the next record begins, so it is sought by its first key, which
    follows a map header of 1, 3 or 5 bytes.
    """
    found = data.find(_FIRST_KEY, offset)
    while found >= 0:
        for map_header in (1, 3, 5):
            start = found - map_header - _HEADER.size
            if start > offset and _record_at(data, start) is not None:
                return True
        found = data.find(_FIRST_KEY, found + 1)
    return False
