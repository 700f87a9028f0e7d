"""[H] `rl-jax watch`: the display of a run that goes on elsewhere, or is over, from its files."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.operate.place import Place, find
from launch.operate.status import status
from launch.operate.status import told as status_lines
from launch.report.data import check_run, is_running
from launch.summary import Summary, report
from launch.tails import end_of_lines, tell_new
from launch.terminal import Stream, reporter
from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.metrics import names

LOOK_S = 0.5
PHASE = "asynchronous RL"


class Growing:
    """The lines of a `metrics.jsonl` that is written to, each update once."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._inode, self._newest = path, 0, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines that are new. Of a run that was resumed the file is another one, which has
        the updates up to its checkpoint."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._read:
                self._inode, self._read = found.st_ino, 0
            again = self._read == 0
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(newline)
            told = [json.loads(line) for line in whole.splitlines()]
            if again:
                # Those that are done a second time are shown a second time.
                self._newest = min(self._newest, told[-1][names.STEP] if told else 0)
            for line in told:
                if line[names.STEP] > self._newest:
                    self._newest = line[names.STEP]
                    yield line


class RunTime:
    """The run's own clock, in seconds since it began: at a line what it says, and on from there."""

    def __init__(self) -> None:
        self._wall, self._heard = 0.0, time.monotonic()

    def heard(self, line: Mapping[str, Any]) -> None:
        self._wall, self._heard = line[names.WALL_SECONDS], time.monotonic()

    def __call__(self) -> float:
        return self._wall + time.monotonic() - self._heard


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="of a run, or of a rendered launch")


def run(given: argparse.Namespace) -> int:
    """Draws until the run ends. UserError where there is none."""
    place = find(given.run)
    check_run(place.run_dir)
    follow(place, sys.stdout)
    print("\n".join(_end(place)))
    return 0


def follow(place: Place, stream: Stream) -> None:
    """Shows every update that is on record and, while the run goes on, those that come."""
    clock, grown = RunTime(), Growing(place.run_dir / "metrics.jsonl")
    total = load(place.config, check_files=False).trainer.updates
    logs = place.run_dir / "logs"
    read = {log: end_of_lines(log) for log in logs.glob("*.log")}
    display = reporter(stream, clock)
    began = done = False
    try:
        if is_running(place.run_dir):
            display.phase("until the next update")
        while not done:
            # Asked first: what was written before the end is shown after it.
            done = not is_running(place.run_dir)
            for line in grown.new():
                clock.heard(line)
                if not began:
                    display.phase(PHASE, total, line[names.STEP])
                began = True
                display.update(line)
            tell_new(logs, read, display.note)
            if not done:
                time.sleep(LOOK_S)
    finally:
        display.close()


def _end(place: Place) -> Iterator[str]:
    """What the run came to, where it is over well, else its state."""
    path = place.run_dir / "summary.json"
    if not path.is_file():
        return status_lines(status(place))
    try:
        return iter(report(Summary(**json.loads(path.read_text(encoding="utf-8")))))
    except (ValueError, TypeError):
        raise UserError(f"{path}: not what this version of `rl-jax run` writes") from None
