"""[H] `rl-jax status`: what a run does or came to, from its files alone."""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.gke.pods import name_of
from launch.operate.place import Place, find, job_of
from launch.operate.running import CRASHES, runner
from launch.report.data import entries, is_running, lines
from launch.report.numbers import state as state_of
from launch.tails import last_lines
from launch.terminal import duration
from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.metrics import names
from rl_jax.replay.events import Event, ProcessEnded, ProcessStarted, VersionPublished
from rl_jax.replay.log import Entry

CRASHED, NEVER, UNSEEN = "crashed", "never started", "not on this machine"


class RoleState(NamedTuple):
    """The newest process of a role; of several that are a world the first that ended badly."""

    role: str
    host: str
    pid: int
    starts: int
    """How often a supervisor started it."""
    exit: int | None
    """None where it lives or, of a run that does not, where nobody saw its end."""


class Status(NamedTuple):
    """What is printed."""

    run: str
    state: str
    """running, stopped, finished, crashed, never started or not on this machine."""
    version: int | None
    update: int
    updates: int
    last_event_s: float | None
    """Seconds since something was recorded."""
    roles: tuple[RoleState, ...]
    error: str | None
    """The last line of who ended badly."""
    more: tuple[str, ...]
    """Commands of the cluster that tell more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="of a run, or of a rendered launch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(given: argparse.Namespace) -> int:
    """Prints the status. UserError where there is no run, or its record cannot be read."""
    found = status(find(given.run))
    if given.json:
        plain = found._asdict() | {"roles": [role._asdict() for role in found.roles]}
        print(json.dumps(plain, ensure_ascii=False))
    else:
        print("\n".join(told(found)))
    return 0


def status(place: Place) -> Status:
    """Reads the record of a run, which may be growing."""
    try:
        recorded = list(entries(place.run_dir))
        updates = load(place.config, check_files=False).trainer.updates
    except ValueError as error:
        raise UserError(str(error)) from error
    state = state_in_words(place, [entry.event for entry in recorded])
    versions = [e.event.version for e in recorded if isinstance(e.event, VersionPublished)]
    roles = (*_own(place), *_roles(place, recorded))
    ends = _last_written(place.run_dir)
    return Status(
        run=str(place.run_dir),
        state=state,
        version=max(versions, default=None),
        update=int((lines(place.run_dir) or ({},))[-1].get(names.STEP, 0)),
        updates=updates,
        last_event_s=None if ends is None else round(max(0.0, time.time() - ends), 1),
        roles=roles,
        error=None if state == "finished" else _error(place, roles),
        more=tuple(commands(place)),
    )


def state_in_words(place: Place, events: Sequence[Event]) -> str:
    """As `Status.state`: a record without an end that nobody writes is a crash; a launch's may be
    on a disk that this machine does not see."""
    running = is_running(place.run_dir)
    if not events and not running:
        return NEVER if place.run_dir.parent.is_dir() else UNSEEN
    found = state_of(events, running=running)
    return CRASHED if found == "killed" else found


def _own(place: Place) -> Iterator[RoleState]:
    """The process that runs the whole, or starts the others."""
    if who := runner(place.run_dir):
        yield RoleState("run", who.host, who.pid, 1, None)


def _roles(place: Place, recorded: Iterable[Entry]) -> Iterator[RoleState]:
    """By the journals of supervisors, each of which tells of its host."""
    found: dict[str, dict[str, _Lives]] = {}
    who = runner(place.run_dir)
    own = who.host if who and not who.scattered else "-"
    for _, program, _, event in recorded:
        match event:
            case ProcessStarted(role, pid):
                found.setdefault(role, {}).setdefault(program, _Lives()).start(pid)
            case ProcessEnded(role, pid, code) if program in found.get(role, {}):
                found[role][program].end(pid, code)
    for role, lives in found.items():
        program, life = max(lives.items(), key=lambda own: own[1].failed is not None)
        pid = life.failed or life.newest
        starts = max(each.starts for each in lives.values())
        host = _host(place, program) or own
        yield RoleState(role, host, pid, starts, life.exits.get(pid))


class _Lives:
    """A role's processes that one supervisor keeps: those of the newest start, by pid."""

    def __init__(self) -> None:
        self.starts = 0
        self.newest = 0
        self.failed: int | None = None
        """The first that ended badly."""
        self.exits: dict[int, int | None] = {}

    def start(self, pid: int) -> None:
        """One more of a world, whose processes start before any ends, else a new start; the end of
        the processes before may be on nobody's record."""
        if not self.exits or any(code is not None for code in self.exits.values()):
            self.starts, self.failed, self.exits = self.starts + 1, None, {}
        self.newest, self.exits[pid] = pid, None

    def end(self, pid: int, code: int) -> None:
        if pid in self.exits:
            self.exits[pid] = code
            if code and self.failed is None:
                self.failed = pid


def _host(place: Place, program: str) -> str:
    """ "host 3": of the plan, where supervisors are numbered by the first process they keep."""
    number = program.partition("-")[2]
    if place.plan is None or not number:
        return ""
    processes = [process for group in place.plan.groups for process in group.processes]
    return f"host {processes[int(number)].host}"


def _last_written(run_dir: Path) -> float | None:
    told = [*run_dir.glob("journal/*/*"), *run_dir.glob("metrics.jsonl")]
    return max((path.stat().st_mtime for path in told), default=None)


def _error(place: Place, roles: Sequence[RoleState]) -> str | None:
    """Of roles that ended badly, of the run's own process, of the launch: the newest last line."""
    bad = [role.role for role in roles if role.exit not in (None, 0)]
    logs = [log for role in bad for log in place.run_dir.glob(f"logs/{role}-*.log")]
    logs += place.run_dir.glob(CRASHES)
    if not logs and place.rendered and not is_running(place.run_dir):
        logs = [*place.rendered.glob("job-*.log"), *place.rendered.glob("babysit.log")]
    newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
    said = last_lines(newest, 1) if newest else []
    return said[0].strip() if said else None


def commands(place: Place) -> list[str]:
    """What the cluster itself can be asked."""
    if place.plan is None:
        return []
    name = name_of(place.plan)
    match place.target:
        case "slurm":
            job = job_of(place)
            return [f"squeue --job {job}" if job else f"squeue --name {place.plan.name}"]
        case "gke":
            return [f"kubectl get pods --selector app.kubernetes.io/instance={name}"]
        case "tpu-vm":
            listing = "gcloud compute instance-groups managed list-instances"
            return [f"{listing} {name}-trainer --project=$PROJECT --zone=$ZONE"]
        case _:
            return []


def told(found: Status) -> Iterator[str]:
    """As lines for people."""
    version = "" if found.version is None else f", version {found.version}"
    yield f"{found.run}: {found.state}, update {found.update}/{found.updates}{version}"
    if found.last_event_s is not None:
        yield f"last event {duration(found.last_event_s)} ago"
    lives = found.state == "running"
    rows = [tuple(_row(role, lives).values()) for role in found.roles]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
    if found.error:
        yield f"last error: {found.error}"
    for command in found.more:
        yield f"more: {command}"


def _row(role: RoleState, lives: bool) -> Mapping[str, Any]:
    end = f"exit {role.exit}" if role.exit is not None else "runs" if lives else "end not seen"
    again = f"started {role.starts} times" if role.starts > 1 else ""
    return {"role": role.role, "at": f"pid {role.pid} on {role.host}", "end": end, "again": again}
