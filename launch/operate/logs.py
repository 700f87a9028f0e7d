"""[H] `rl-jax logs`: what the roles of a run printed, each line under its role's name."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from launch.operate.place import Place, find
from launch.report.data import is_running
from launch.tails import end_of_lines, last_lines, tell_new, writer
from rl_jax.config.base import UserError

LINES = 20
LOOK_S = 0.3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="of a run, or of a rendered launch")
    parser.add_argument("role", nargs="?", metavar="ROLE", help="one role, as sampler-0")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("-n", type=_count, default=LINES, metavar="N", dest="lines",
                        help=f"the last N lines of each log (default: {LINES})")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number of lines, 0 or more")
    return int(text)


def run(given: argparse.Namespace) -> int:
    """Prints. UserError where there is no log, or none of ROLE."""
    place, wanted = find(given.run), given.role
    logs = [log for folder in folders(place) for log in sorted(folder.glob("*.log"))]
    follows = given.follow and is_running(place.run_dir)
    if wanted and not any(is_of(writer(log), wanted) for log in logs):
        known = ", ".join(sorted({writer(log) for log in logs})) or "no log yet"
        raise UserError(f"{given.run}: no log of {wanted}; there is {known}")
    if not logs and not follows:
        raise UserError(
            f"{place.run_dir}: no logs: roles have them where they are processes (--roles "
            "processes, or a launch), and a run in one process where it crashed"
        )
    read = {log: end_of_lines(log) for log in logs}
    for log in logs:
        if not wanted or is_of(writer(log), wanted):
            for line in last_lines(log, given.lines, read[log] if follows else None):
                print(f"{writer(log)}: {line}", flush=True)
    if follows:
        _follow(place, wanted, read)
    return 0


def folders(place: Place) -> Iterator[Path]:
    """Where roles write, and where who starts them on a cluster does."""
    yield place.run_dir / "logs"
    if place.rendered:
        yield from (place.rendered / "logs" / "latest", place.rendered)


def is_of(name: str, role: str) -> bool:
    """Whether a log's writer is `role`, or one process of its world."""
    return name == role or name.startswith((f"{role}-", f"{role}."))


def _follow(place: Place, wanted: str | None, read: dict[Path, int]) -> None:
    def tell(line: str) -> None:
        if not wanted or is_of(line.partition(": ")[0], wanted):
            print(line, flush=True)

    going = True
    while going:
        # Asked first: what was written before the end is read after it.
        going = is_running(place.run_dir)
        for folder in folders(place):
            tell_new(folder, read, tell)
        if going:
            time.sleep(LOOK_S)
