"""[H] A run's journals: one for each program, read together in the order of cause and effect.

Each entry carries the logical clock of its process. A process that tells another something sends
its clock along, and the other witnesses it first; so what was caused has the higher clock.
"""

import asyncio
import heapq
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rl_jax.replay import journal
from rl_jax.replay.events import Event, decode, encode
from rl_jax.replay.records import sync_directory
from rl_jax.trajectories.codec import Plain

FORMAT = 2
"""Of a run's journals and trajectory logs together."""
PROGRAMS = ("trainer", "orchestrator", "sampler", "supervisor")
"""Where there are several samplers they are sampler-0, sampler-1, ..."""

_PROGRAM = re.compile(rf"({'|'.join(PROGRAMS)})(-\d+)?")


class Clock:
    """Lamport's logical clock of one process, shared by its programs; used on one event loop."""

    def __init__(self) -> None:
        self._now = 0

    @property
    def now(self) -> int:
        return self._now

    def tick(self) -> int:
        """One further; the new time is returned."""
        self._now += 1
        return self._now

    def witness(self, other: int) -> None:
        """A message told of the time `other`: whatever comes next is later."""
        self._now = max(self._now, other)


class Entry(NamedTuple):
    """An event, and where it stands. Entries of a run are ordered by (clock, program, sequence)."""

    clock: int
    program: str
    sequence: int
    """Counts the program's entries from 0."""
    event: Event


class ProgramLog:
    """The journal of one program, open for appending; made by `open_log`."""

    def __init__(self, program: str, to: journal.Journal, clock: Clock, sequence: int) -> None:
        self.program = program
        self._journal = to
        self._clock = clock
        self._sequence = sequence

    def append(self, event: Event) -> asyncio.Future[None]:
        """Puts the event in line under the next clock and sequence number; await for durability.

        An OSError where writing failed, now or before.
        """
        entry = Entry(self._clock.tick(), self.program, self._sequence, event)
        future = self._journal.append(encode_entry(entry))
        self._sequence += 1
        return future

    async def close(self) -> None:
        """Writes what is in line; an OSError where writing failed."""
        await self._journal.close()


def open_log(run_dir: Path, program: str, clock: Clock) -> ProgramLog:
    """The program's journal, created or gone on with: a cut tail is truncated, the clock witnesses
    the last entry. A ValueError names what is no journal of this version, or broken."""
    prepare(run_dir)
    path = _journal_dir(run_dir, program)
    if not journal.exists(path):
        return ProgramLog(program, journal.create(path), clock, 0)
    opened, _ = journal.reopen(path)
    sequence = 0
    for entry in read(run_dir, program):
        clock.witness(entry.clock)
        sequence = entry.sequence + 1
    return ProgramLog(program, opened, clock, sequence)


def read(run_dir: Path, program: str) -> Iterator[Entry]:
    """The program's entries in order, up to a cut tail; changes nothing.

    A ValueError names the journal where an entry is missing, foreign or out of order.
    """
    check_format(run_dir)
    path = _journal_dir(run_dir, program)
    clock = 0
    for sequence, plain in enumerate(journal.read(path)):
        try:
            entry = decode_entry(program, plain)
        except ValueError as error:
            raise ValueError(f"{path}: entry {sequence}: {error}") from error
        if entry.sequence != sequence or entry.clock <= clock:
            raise ValueError(
                f"{path}: entry {entry.sequence} at clock {entry.clock}, where entry {sequence} "
                f"after clock {clock} was due"
            )
        clock = entry.clock
        yield entry


def merged(run_dir: Path) -> Iterator[Entry]:
    """The entries of all programs, by (clock, program, sequence): no effect before its cause."""
    check_format(run_dir)
    logs = [
        read(run_dir, path.name)
        for path in sorted((run_dir / "journal").glob("*"))
        if journal.exists(path)
    ]
    return heapq.merge(*logs, key=lambda entry: entry[:3])


def encode_entry(entry: Entry) -> Plain:
    """The record of an entry; the program is told by the directory."""
    plain = encode(entry.event)
    kind = plain.pop("kind")
    return {"kind": kind, "clock": entry.clock, "seq": entry.sequence, **plain}


def decode_entry(program: str, value: Plain) -> Entry:
    """The entry of a record; a ValueError names what is wrong."""
    plain = dict(value)
    clock, sequence = (_count(name, plain.pop(name, None)) for name in ("clock", "seq"))
    return Entry(clock, program, sequence, decode(plain))


def prepare(run_dir: Path) -> None:
    """Marks a run directory that holds no record yet; a ValueError where it holds a foreign one."""
    if not any((run_dir / name).exists() for name in ("FORMAT", "journal", "trajectories")):
        write_format(run_dir)
    check_format(run_dir)


def write_format(run_dir: Path) -> None:
    """Says in the run's directory, made where it is missing, which format its record has."""
    run_dir.mkdir(parents=True, exist_ok=True)
    partial = run_dir / f".FORMAT.{os.getpid()}"
    partial.write_text(_format_line(FORMAT))
    partial.replace(run_dir / "FORMAT")
    sync_directory(run_dir)


def check_format(run_dir: Path) -> None:
    """A ValueError where the record of a run is not of this version."""
    path = run_dir / "FORMAT"
    text = path.read_text(errors="replace") if path.is_file() else ""
    if text == _format_line(FORMAT):
        return
    found = re.fullmatch(_format_line(r"(\d{1,9})"), text)
    number = found[1] if found else "1 (or unknown)"
    raise ValueError(f"{run_dir}: a run of format {number}; this version reads format {FORMAT}")


def check_program(program: str) -> None:
    """A ValueError where there is no such program."""
    if not _PROGRAM.fullmatch(program):
        raise ValueError(f"no program {program!r}: one of {', '.join(PROGRAMS)}, or sampler-0, ...")


def _format_line(number: object) -> str:
    return f"rl_jax run {number}\n"


def _journal_dir(run_dir: Path, program: str) -> Path:
    check_program(program)
    return run_dir / "journal" / program


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.80}; a whole number from 0 up is right")
    return value
