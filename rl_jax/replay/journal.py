"""[H] The write-ahead log: append-only segments, each append durable before it is answered.

A segment `NNNNNN.journal` is records end to end; a record is length (uint32), CRC32 of the payload
(uint32), both little-endian, and the payload, a msgpack map whose first key is "kind". A record is
never split over segments. Knows nothing of what the events mean.
"""

import asyncio
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

SEGMENT_BYTES = 64 << 20
"""A segment that would grow above this is followed by the next one."""
MAX_RECORD = 1 << 30
"""Bytes of one payload."""

_HEADER = struct.Struct("<II")
_SUFFIX = ".journal"
_FIRST_KEY = msgpack.Packer().pack("kind")


class Journal:
    """Open for appending, by one process; made by `create` or `reopen`, used on one event loop."""

    def __init__(
        self, path: Path, number: int, *, segment_bytes: int = SEGMENT_BYTES, timeout: float = 60.0
    ) -> None:
        """Appends to segment `number` of the directory `path`; `timeout` bounds one write, in
        seconds."""
        self._path = path
        self._lock = _lock(path)
        self._number = number
        self._segment_bytes = segment_bytes
        self._timeout = timeout
        self._file = _open_segment(path, number)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._closed = False

    def append(self, event: Mapping[str, Any]) -> asyncio.Future[None]:
        """Puts the record in line, at once and in the order of the calls; await for durability.

        Records in line share one fsync. Where a write failed, this and every later append fail:
        what lies on disk after a failed fsync is unknown.
        """
        if self._closed:
            raise ValueError(f"{self._path}: append to a closed journal")
        record = encode_record(event)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # An append that nobody awaits is allowed; its failure shows in the next one.
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        if self._error is not None:
            future.set_exception(_failure(self._path, self._error))
            return future
        self._waiting.append((record, future))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._drain())
        return future

    async def close(self) -> None:
        """Writes what is in line, then frees the journal; raises where writing failed."""
        self._closed = True
        if self._writer is not None:
            await self._writer
        self._file.close()
        os.close(self._lock)
        if self._error is not None:
            raise _failure(self._path, self._error)

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                async with asyncio.timeout(self._timeout):
                    await asyncio.to_thread(self._write, [record for record, _ in batch])
            except Exception as error:
                self._error = error
                batch += self._waiting
                self._waiting = []
            for _, future in batch:
                if future.done():
                    continue
                if self._error is None:
                    future.set_result(None)
                else:
                    future.set_exception(_failure(self._path, self._error))
        self._writer = None

    def _write(self, records: list[bytes]) -> None:
        for record in records:
            size = self._file.tell()
            if size and size + len(record) > self._segment_bytes:
                self._sync()
                self._file.close()
                self._number += 1
                self._file = _open_segment(self._path, self._number)
            self._file.write(record)
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def create(path: Path, *, segment_bytes: int = SEGMENT_BYTES, timeout: float = 60.0) -> Journal:
    """A new journal in the directory `path`; a ValueError where one exists."""
    if _segments(path):
        raise ValueError(f"{path} holds a journal already; resume that run or choose another name")
    path.mkdir(parents=True, exist_ok=True)
    return Journal(path, 0, segment_bytes=segment_bytes, timeout=timeout)


def reopen(
    path: Path, *, segment_bytes: int = SEGMENT_BYTES, timeout: float = 60.0
) -> tuple[Journal, int]:
    """An existing journal, and how many bytes of a cut tail were truncated to open it.

    Checks every segment: a ValueError names file and offset of a record that is broken with whole
    ones after it, and nothing is changed.
    """
    segments = _segments(path)
    if not segments:
        raise ValueError(f"{path} holds no journal")
    lock = _lock(path)
    try:
        tail = [_scan(segment, last=segment == segments[-1]) for segment in segments][-1]
        cut = tail.size - tail.end
        if cut:
            os.truncate(segments[-1], tail.end)
    finally:
        os.close(lock)
    number = int(segments[-1].stem)
    return Journal(path, number, segment_bytes=segment_bytes, timeout=timeout), cut


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The payloads in order, up to a cut tail; changes nothing. Errors as `reopen`."""
    segments = _segments(path)
    if not segments:
        raise ValueError(f"{path} holds no journal")
    for segment in segments:
        yield from map(unpack, _scan(segment, last=segment == segments[-1]).payloads)


def encode_record(event: Mapping[str, Any]) -> bytes:
    """One record; a ValueError where "kind" is not the first key or the payload is too large."""
    if next(iter(event), None) != "kind":
        raise ValueError(f"a record begins with its kind, not with {next(iter(event), None)!r}")
    payload: bytes = msgpack.Packer().pack(event)
    if len(payload) > MAX_RECORD:
        raise ValueError(f"a record of {len(payload)} bytes; at most {MAX_RECORD}")
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def unpack(payload: bytes) -> dict[str, Any]:
    """The event of a payload."""
    return msgpack.unpackb(payload, strict_map_key=True)


class _Scan(NamedTuple):
    payloads: list[bytes]
    end: int
    """Where the last whole record ends."""
    size: int


def _scan(segment: Path, *, last: bool) -> _Scan:
    data = segment.read_bytes()
    payloads: list[bytes] = []
    offset = 0
    while (payload := _record_at(data, offset)) is not None:
        payloads.append(payload)
        offset += _HEADER.size + len(payload)
    if offset < len(data) and (not last or _record_follows(data, offset)):
        raise ValueError(f"{segment} is corrupt at byte {offset}: a record does not match its CRC")
    return _Scan(payloads, offset, len(data))


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


def _segments(path: Path) -> list[Path]:
    """The segments in order; a ValueError names one that is missing."""
    found = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else []
    for number, segment in enumerate(found):
        if segment.name != _name(number):
            raise ValueError(f"{path / _name(number)} is missing: {segment.name} is there")
    return found


def _name(number: int) -> str:
    return f"{number:06d}{_SUFFIX}"


def _open_segment(path: Path, number: int) -> Any:
    segment = path / _name(number)
    file = segment.open("ab")
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return file


def _lock(path: Path) -> int:
    """Holds the directory for this process, until the descriptor is closed or the process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{path} is being written by another process") from None
    return descriptor


def _failure(path: Path, error: BaseException) -> OSError:
    text = f"{type(error).__name__}: {error}"
    failure = OSError(f"{path}: the journal cannot be written ({text})")
    failure.__cause__ = error
    return failure
