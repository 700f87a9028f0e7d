"""[H] Every trajectory of a run once, with its fate: `trajectories/PROGRAM-NNNNNN.*`.

An interval NNNNNN is written to a `.wal`, a file of records, where a group's fate is open. When all
its groups have fates it is sealed: written again with them, compressed and with an index, as an
`.array_record`, which takes the place of the `.wal` in one rename. Fates between are told by the
journal. A record of either is a unit of `fates.py`.
"""

import asyncio
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import array_record.python.array_record_module as array_record_module
import msgpack

from rl_jax.replay.events import GroupId, group_id
from rl_jax.replay.fates import (
    OPEN,
    Fate,
    Kind,
    Recorded,
    Unit,
    decode_unit,
    encode_unit,
    with_fate,
)
from rl_jax.replay.log import check_format, check_program, prepare
from rl_jax.replay.records import Appender, encode_record, lock, scan, sync_directory, unpack
from rl_jax.trajectories.types import Group, Trajectory

SEAL_TIMEOUT = 600.0
"""Seconds that writing one sealed interval may take."""

_SEALED, _WAL, _PARTIAL = ".array_record", ".wal", ".partial"
_NAME = re.compile(rf"(.+)-(\d{{6,}})({_SEALED}|{_WAL}|{_PARTIAL})")


class _File(NamedTuple):
    program: str
    number: int
    path: Path


@dataclass(eq=False)
class _Interval:
    """One that holds something and is not sealed."""

    path: Path
    """Its `.wal`."""
    open: set[GroupId] = field(default_factory=set)
    fates: dict[GroupId, Fate] = field(default_factory=dict)
    sealing: asyncio.Task[None] | None = None


class TrajectoryLog:
    """Open for appending, by one process; made by `open_trajectory_log`, used on one event loop.

    Once a write failed, this and every later call that writes fails with an OSError that names the
    file.
    """

    def __init__(self, run_dir: Path, program: str) -> None:
        self._directory = run_dir / "trajectories"
        self._program = program
        self._lock = lock(self._directory / f"{program}.lock")
        self._appender = Appender()
        self._groups: dict[GroupId, Group] = {}
        self._intervals: dict[int, _Interval] = {}
        self._number = 0
        self._recover()

    @property
    def open_groups(self) -> Mapping[GroupId, Group]:
        """Put and not settled, in the order of put."""
        return types.MappingProxyType(self._groups)

    async def put(self, group: Group) -> None:
        """Durable when it returns, without a fate. A ValueError where the group is here already."""
        name = group_id(group)
        if any(name in i.open or name in i.fates for i in self._intervals.values()):
            raise ValueError(f"group {name.task} {name.prompt} is in the trajectory log already")
        future = self._append(Unit(group, OPEN))
        self._groups[name] = group
        self._intervals[self._number].open.add(name)
        await future

    async def add(self, trajectories: Sequence[Trajectory], fate: Fate) -> None:
        """Durable when it returns; each trajectory a unit of its own, its fate known at once."""
        futures = [self._append(Unit(trajectory, fate)) for trajectory in trajectories]
        await asyncio.gather(*futures)

    def settle(self, group: GroupId, fate: Fate) -> None:
        """What became of a group that was put; a ValueError for any other, or a second time."""
        if fate.kind is Kind.OPEN:
            raise ValueError(f"group {group.task} {group.prompt}: open is no fate to settle it by")
        if self._groups.pop(group, None) is None:
            raise ValueError(
                f"group {group.task} {group.prompt} cannot be {fate.kind}: never put, or settled"
            )
        interval = next(i for i in self._intervals.values() if group in i.open)
        interval.open.remove(group)
        interval.fates[group] = fate

    async def rotate(self) -> None:
        """Begins a new interval and seals each older one whose groups all have fates."""
        self._appender.check()
        if self._number in self._intervals:
            self._number += 1
        for number, interval in list(self._intervals.items()):
            if interval.open or number == self._number:
                continue
            if interval.sealing is None:
                interval.sealing = asyncio.create_task(self._seal(number, interval))
            # Going on when the caller is cancelled: no interval is sealed twice at a time.
            await asyncio.shield(interval.sealing)

    async def close(self) -> None:
        """Seals what it can and frees the log; what has open groups stays in its `.wal`."""
        try:
            await self.rotate()
        finally:
            try:
                await self._appender.close()
            finally:
                os.close(self._lock)

    def _append(self, unit: Unit) -> asyncio.Future[None]:
        path = self._directory / f"{self._program}-{self._number:06d}{_WAL}"
        future = self._appender.append(path, encode_record(encode_unit(unit)))
        self._intervals.setdefault(self._number, _Interval(path))
        return future

    async def _seal(self, number: int, interval: _Interval) -> None:
        await self._appender.flush()
        try:
            async with asyncio.timeout(SEAL_TIMEOUT):
                await asyncio.to_thread(_seal, interval.path, interval.fates)
        except (OSError, RuntimeError) as error:  # array_record raises the latter
            self._appender.fail(interval.path.with_suffix(_SEALED), error)
            self._appender.check()
        del self._intervals[number]

    def _recover(self) -> None:
        """Ends a sealing that was cut short, truncates cut tails, reads what is not sealed."""
        found = [f for f in _files(self._directory) if f.program == self._program]
        self._number = max((f.number for f in found), default=-1) + 1
        sealed = {f.number for f in found if f.path.suffix == _SEALED}
        for file in found:
            if file.path.suffix == _PARTIAL or (file.path.suffix == _WAL and file.number in sealed):
                file.path.unlink()
            elif file.path.suffix == _WAL:
                self._recover_wal(file)

    def _recover_wal(self, file: _File) -> None:
        whole = scan(file.path, may_be_cut=True)
        if not whole.payloads:
            file.path.unlink()
            return
        os.truncate(file.path, whole.end)
        interval = self._intervals[file.number] = _Interval(file.path)
        for unit in _units(file.path, whole.payloads):
            if isinstance(unit.body, Group):
                interval.open.add(group_id(unit.body))
                self._groups[group_id(unit.body)] = unit.body


def open_trajectory_log(run_dir: Path, program: str) -> TrajectoryLog:
    """The program's trajectory log, created or gone on with: cut tails are truncated, and the
    groups of intervals that are not sealed are open until they are settled again. A ValueError
    names what is no record of this version, or broken."""
    check_program(program)
    prepare(run_dir)
    (run_dir / "trajectories").mkdir(exist_ok=True)
    return TrajectoryLog(run_dir, program)


def read_trajectories(run_dir: Path) -> Iterator[Recorded]:
    """The trajectories of all programs, of a run that goes on or ended in any way: sealed intervals
    in order, then the others, whose groups are open. Padding copies are included, with `copy_of`
    set. Errors as `open_trajectory_log`."""
    for program, unit in _read(run_dir):
        members = unit.body.members if isinstance(unit.body, Group) else (unit.body,)
        yield from (Recorded(member, unit.fate, program) for member in members)


def read_groups(run_dir: Path, program: str = "trainer") -> Iterator[tuple[Group, Fate]]:
    """The groups that a program put, each with its fate, in the order of `read_trajectories`."""
    for name, unit in _read(run_dir):
        if name == program and isinstance(unit.body, Group):
            yield unit.body, unit.fate


def _files(directory: Path) -> list[_File]:
    """What belongs to intervals: sealed ones by program and number, then `.wal`, then partial."""
    found = [(_NAME.fullmatch(path.name), path) for path in directory.glob("*")]
    files = [_File(match[1], int(match[2]), path) for match, path in found if match]
    order = [_SEALED, _WAL, _PARTIAL]
    return sorted(files, key=lambda f: (order.index(f.path.suffix), f.program, f.number))


def _read(run_dir: Path) -> Iterator[tuple[str, Unit]]:
    check_format(run_dir)
    files = _files(run_dir / "trajectories")
    sealed = {file.path for file in files if file.path.suffix == _SEALED}
    for program, _, path in files:
        if path in sealed or (path.suffix == _WAL and path.with_suffix(_SEALED) not in sealed):
            yield from ((program, unit) for unit in _units_of(path))


def _units_of(path: Path) -> Iterator[Unit]:
    """The units of a file of either sort; a `.wal` may be sealed while it is read."""
    if path.suffix == _SEALED:
        return _units(path, _read_sealed(path))
    try:
        payloads = scan(path, may_be_cut=True).payloads
    except FileNotFoundError:
        path = path.with_suffix(_SEALED)
        payloads = _read_sealed(path)
    return _units(path, payloads)


def _units(path: Path, payloads: Iterator[bytes] | Sequence[bytes]) -> Iterator[Unit]:
    for i, payload in enumerate(payloads):
        try:
            yield decode_unit(unpack(payload))
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"{path}: record {i}: {error}") from error


def _read_sealed(path: Path) -> Iterator[bytes]:
    # No read-ahead: a thread and 16 MB for each core would outweigh the file.
    options = "readahead_buffer_size:0,max_parallelism:0"
    try:
        reader = array_record_module.ArrayRecordReader(str(path), options)
        if not reader.ok():
            reader.close()  # raises what is wrong
        for i in range(reader.num_records()):
            yield from reader.read([i])
    except RuntimeError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def _seal(wal: Path, fates: Mapping[GroupId, Fate]) -> None:
    """Makes the sealed file of a `.wal`, then removes it. Wherever this is cut short, one of the
    two is whole, and the sealed one counts where both are there."""
    partial, sealed = wal.with_suffix(_PARTIAL), wal.with_suffix(_SEALED)
    payloads = scan(wal, may_be_cut=False).payloads
    writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
    try:
        for payload in payloads:
            writer.write(_sealed_payload(payload, fates))
    finally:
        writer.close()
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, sealed)
    sync_directory(wal.parent)
    wal.unlink()


def _sealed_payload(payload: bytes, fates: Mapping[GroupId, Fate]) -> bytes:
    plain = unpack(payload)
    if plain["kind"] == "group":
        body = plain["v"][1]
        plain = with_fate(plain, fates[GroupId(body["task"], body["prompt"])])
    return msgpack.Packer().pack(plain)
