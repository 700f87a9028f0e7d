"""[H] The write-ahead log: append-only segments, each append durable before it is answered.

A segment `NNNNNN.journal` is records end to end; a record is never split over segments. Knows
nothing of what the events mean.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_jax.replay.records import Appender, encode_record, lock, scan, unpack

SEGMENT_BYTES = 64 << 20
"""A segment that would grow above this is followed by the next one."""

LOCK = "lock"
"""A file beside the segments that whoever writes them holds locked: not the directory, since
other hosts of NFS see the locks of regular files alone."""
_SUFFIX = ".journal"


class Journal:
    """Open for appending, by one process; made by `create` or `reopen`, used on one event loop."""

    def __init__(
        self, path: Path, number: int, *, segment_bytes: int = SEGMENT_BYTES, timeout: float = 60.0
    ) -> None:
        """Appends to segment `number` of the directory `path`; `timeout` bounds one write, in
        seconds."""
        self._path = path
        self._lock = lock(path / LOCK)
        self._number = number
        self._segment_bytes = segment_bytes
        self._appender = Appender(timeout=timeout)
        self._appender.open(path / _name(number))
        self._size = (path / _name(number)).stat().st_size

    def append(self, event: Mapping[str, Any]) -> asyncio.Future[None]:
        """Puts the record in line, at once and in the order of the calls; await for durability.

        Records in line share one fsync. Where a write failed, this and every later append fail.
        """
        record = encode_record(event)
        if self._size and self._size + len(record) > self._segment_bytes:
            self._number += 1
            self._size = 0
        self._size += len(record)
        return self._appender.append(self._path / _name(self._number), record)

    async def close(self) -> None:
        """Writes what is in line, then frees the journal; raises where writing failed."""
        try:
            await self._appender.close()
        finally:
            os.close(self._lock)


def create(path: Path, *, segment_bytes: int = SEGMENT_BYTES, timeout: float = 60.0) -> Journal:
    """A new journal in the directory `path`; a ValueError where one exists."""
    if exists(path):
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
    held = lock(path / LOCK)
    try:
        tail = [scan(segment, may_be_cut=segment == segments[-1]) for segment in segments][-1]
        cut = tail.size - tail.end
        if cut:
            os.truncate(segments[-1], tail.end)
    finally:
        os.close(held)
    number = int(segments[-1].stem)
    return Journal(path, number, segment_bytes=segment_bytes, timeout=timeout), cut


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The payloads in order, up to a cut tail; changes nothing. Errors as `reopen`."""
    segments = _segments(path)
    if not segments:
        raise ValueError(f"{path} holds no journal")
    for segment in segments:
        yield from map(unpack, scan(segment, may_be_cut=segment == segments[-1]).payloads)


def exists(path: Path) -> bool:
    """Whether the directory `path` holds a journal."""
    return bool(_segments(path))


def _segments(path: Path) -> list[Path]:
    """The segments in order; a ValueError names one that is missing."""
    found = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else []
    for number, segment in enumerate(found):
        if segment.name != _name(number):
            raise ValueError(f"{path / _name(number)} is missing: {segment.name} is there")
    return found


def _name(number: int) -> str:
    return f"{number:06d}{_SUFFIX}"
