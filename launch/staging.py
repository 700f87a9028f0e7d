"""[H] A directory that appears whole: made beside its place, resumed after a kill, renamed last."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_jax.config.base import UserError
from rl_jax.snapshots.leaves import drop_cut_line
from rl_jax.snapshots.store import check_room

_PLAN = "plan.sha256"
_DONE = "done.jsonl"
_LOCK = "lock"


@dataclass
class Staging:
    """What is to become `out` grows in `path`; `plan` is all that decides what it will hold."""

    out: Path
    verb: str
    done: set[str] = field(default_factory=set)
    """What `mark` was called with, also by an earlier process."""

    @property
    def path(self) -> Path:
        return self.out.with_name(f"{self.out.name}.{self.verb}")

    def check(self, plan: Any) -> None:
        """Writes nothing; `done` is what an earlier process with the same plan left.

        UserError where `out` exists or cannot be, or its place is not ours or of another plan.
        """
        if self.out.exists() or self.out.is_symlink():
            raise UserError(f"{self.out} exists and is left as it is: choose another with --out")
        there = next(p for p in self.out.absolute().parents if p.exists() or p.is_symlink())
        if not there.is_dir():
            raise UserError(f"{there} is no directory: choose another place with --out")
        begun = self.path / _PLAN
        if begun.is_file():
            if begun.read_text(errors="replace") != _digest(plan):
                raise UserError(
                    f"{self.path} is left from another source or other options: remove it, or "
                    "choose another place with --out"
                )
        elif not _unused(self.path):
            raise UserError(
                f"{self.path} is in the way and none of ours: remove it, or choose another place "
                "with --out"
            )
        done = self.path / _DONE
        lines = done.read_text(encoding="utf-8").split("\n")[:-1] if done.is_file() else []
        self.done = {json.loads(line) for line in lines}

    def check_room(self, needed: int) -> None:
        """For `needed` bytes; an OSError of one line where they are not free."""
        check_room(next(path for path in self.out.absolute().parents if path.is_dir()), needed)

    @contextmanager
    def open(self, plan: Any) -> Iterator[None]:
        """Begins, or takes up what was begun; nobody else does meanwhile."""
        self.check(plan)
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path}: another process is at work there") from None
            # Whoever had the lock may have ended, or begun, since it was looked at.
            self.check(plan)
            drop_cut_line(self.path / _DONE)
            if not (self.path / _PLAN).is_file():
                _write(self.path / _PLAN, _digest(plan))
            yield

    def mark(self, names: Sequence[str]) -> None:
        """These are on the disk for good."""
        with (self.path / _DONE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(name) + "\n" for name in names)
            file.flush()
            os.fsync(file.fileno())
        self.done |= set(names)

    def discard(self) -> None:
        """Removes what was begun, as far as that goes: nothing can become of it. Not while it is
        open: a disk of the network keeps the lock's file until it is closed."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finish(self) -> None:
        """Makes it `out`, at one stroke. All in it must be on the disk."""
        self.path.rename(self.out)
        # Not before: without its plan what lies there is nobody's.
        for name in (_DONE, _LOCK, _PLAN):
            (self.out / name).unlink(missing_ok=True)
        _sync(self.out)
        _sync(self.out.parent)


def _unused(path: Path) -> bool:
    """Not there, or nothing in it but what we leave before there is a plan."""
    if not path.is_dir() or path.is_symlink():
        return not path.exists() and not path.is_symlink()
    return {one.name for one in path.iterdir()} <= {_LOCK, f"{_PLAN}.tmp"}


def in_parts(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, in parts of at most `limit` bytes, unless one alone is larger."""
    part: list[str] = []
    held = 0
    for name, size in sizes.items():
        if part and held + size > limit:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    if part:
        yield part


def _digest(plan: Any) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest() + "\n"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
