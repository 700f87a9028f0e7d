"""[H] `rl-jax logs`: what the roles of a run printed, each line under its role's name."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.operate import launched
from launch.operate.place import Place, find
from launch.report.data import is_running
from launch.role import DONE
from launch.tails import end_of_lines, last_lines, tell_new, writer
from rl_jax.config.base import UserError

LINES = 20
LOOK_S = 0.3
ASK_S = 10.0
"""Between two questions to who keeps a launch: a cluster's service may answer them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="of a run, or of a rendered launch")
    parser.add_argument("role", nargs="?", metavar="ROLE", help="one role, as sampler-0")
    parser.add_argument(
        "--follow", action="store_true", help="go on until the run, or its launch, ends"
    )
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
    goes_on = _Going(place)
    follows = given.follow and goes_on()
    known = {writer(log) for log in logs}
    there = any(is_of(name, wanted) for name in known) if wanted else bool(logs)
    if not there:
        if not follows or (wanted and not _comes(place, wanted)):
            raise UserError(_absent(given.run, place, wanted, known))
        what = f"log of {wanted}" if wanted else "logs"
        who = launched.in_words(place)
        print(f"{given.run}: no {what} yet: waiting for {who}", file=sys.stderr, flush=True)
    read = {log: end_of_lines(log) for log in logs}
    for log in logs:
        if not wanted or is_of(writer(log), wanted):
            for line in last_lines(log, given.lines, read[log] if follows else None):
                print(f"{writer(log)}: {line}", flush=True)
    if follows:
        _follow(place, wanted, read, goes_on)
    return 0


def folders(place: Place) -> Iterator[Path]:
    """Where roles write, and where who starts them on a cluster does."""
    yield place.run_dir / "logs"
    if place.rendered:
        yield from (place.rendered / "logs" / "latest", place.rendered)


def is_of(name: str, role: str) -> bool:
    """Whether a log's writer is `role`, or one process of its world."""
    return name == role or name.startswith((f"{role}-", f"{role}."))


def _comes(place: Place, wanted: str) -> bool:
    """Whether the launch has such a role, or a world with such a process."""
    names = [group.name for group in place.plan.groups] if place.plan else []
    return any(is_of(name, wanted) or is_of(wanted, name) for name in names)


def _absent(given: Path, place: Place, wanted: str | None, known: set[str]) -> str:
    if wanted:
        return f"{given}: no log of {wanted}; there is {', '.join(sorted(known)) or 'no log yet'}"
    return (
        f"{place.run_dir}: no logs: roles have them where they are processes (--roles "
        "processes, or a launch), and a run in one process where it crashed"
    )


class _Going:
    """Whether more may be written: by the run, or, until that is done, by another attempt."""

    def __init__(self, place: Place) -> None:
        self._place, self._ask_at, self._said = place, 0.0, ""

    def __call__(self) -> bool:
        if is_running(self._place.run_dir):
            return True
        if (self._place.run_dir / DONE).is_file():
            return False
        return time.monotonic() < self._ask_at or self._ask()

    def _ask(self) -> bool:
        try:
            lives = launched.lives(self._place)
        except UserError as error:
            # Who does not answer now may do so later.
            if str(error) != self._said:
                print(f"rl-jax: {error}; it is asked again", file=sys.stderr, flush=True)
            lives, self._said = True, str(error)
        # A process of this machine can be asked every time.
        self._ask_at = time.monotonic() + (ASK_S if self._place.target != "tpu-vm" else 0.0)
        return lives


def _follow(
    place: Place, wanted: str | None, read: dict[Path, int], goes_on: Callable[[], bool]
) -> None:
    def tell(line: str) -> None:
        if not wanted or is_of(line.partition(": ")[0], wanted):
            print(line, flush=True)

    going = True
    while going:
        # Asked first: what was written before the end is read after it.
        going = goes_on()
        for folder in folders(place):
            tell_new(folder, read, tell)
        if going:
            time.sleep(LOOK_S)
