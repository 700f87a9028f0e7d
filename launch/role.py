"""[H] `rl-jax role`: what one machine of a launch does, or one role of it in a pod of its own.

Reads the plan, where the others are and the token; starts its processes and keeps them. The exit
status tells whoever started it what to do: 0 done, 2 a mistake of the user's, 42 stopped with a
checkpoint (start it again), 134 a peer of a world is lost (start all again), 1 anything else.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch.engine.base import GroupSpec
from launch.engine.local import LocalEngine
from launch.failure import first_cause
from launch.processes import BACKOFF_S
from launch.report.data import seconds_on_record
from launch.roles.base import Role
from launch.run_directory import create_run
from launch.site import Site, addresses_of, read_site, specs_of
from launch.spec import LaunchPlan, Process, RoleGroup, members
from launch.supervisor import Restart, RoleFailed, Supervisor
from launch.supervisor import Role as Kept
from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.replay import events
from rl_jax.replay.log import Clock, ProgramLog, open_log

STOPPED, PEER_LOST = 42, 134
ALIVE = "RL_JAX_ALIVE"
"""A file to touch while all is well, for who looks at its age."""
LOOK_S = 0.5
"""How often the shared directory is looked at."""
DONE = "summary.json"
"""Written last: who has it knows that the run is over."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="one role, as trainer or sampler-0")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, as render writes it")
    parser.add_argument("--host", type=int, metavar="N", help="all roles of this machine")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="NAME's process N")


def run(given: argparse.Namespace) -> int:
    """Plays the roles to the end of the run or until a signal. UserError before anything starts."""
    plan = read_plan(given.plan)
    site = read_site(plan)
    mine = _mine(plan, given.name, given.host, given.rank)
    os.chdir(given.plan.parent)  # what is relative in a plan is so to its place
    run_dir = Path(plan.run_dir).absolute()
    if (run_dir / DONE).is_file():
        print(f"rl-jax: {run_dir} is finished", flush=True)
        return 0
    leads = any(group.name == "trainer" and process.rank == 0 for group, process in mine)
    if leads and not run_dir.exists():
        text = Path("config.toml").read_text(encoding="utf-8")
        create_run(run_dir, load(Path("config.toml")), text)
    _await_run(run_dir, mine[0][0].deadlines.start_s)
    try:
        completed = asyncio.run(_supervise(plan, site, mine, run_dir))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    except RoleFailed as failed:
        print(f"rl-jax: {failed}", file=sys.stderr, flush=True)
        lost = str(failed).partition(":")[0].partition(".")[0]
        return PEER_LOST if len(plan.group(lost).processes) > 1 else 1
    # A sampler does not know the run's end from a stop: it ends with 0 when it is told to.
    completed = completed and any(group.kind != "sampler" for group, _ in mine)
    if leads and completed:
        _finish(run_dir)
    if completed or (run_dir / DONE).is_file():
        return 0
    print(f"rl-jax: {run_dir} was stopped; started again it goes on", flush=True)
    return STOPPED


def read_plan(path: Path) -> LaunchPlan:
    """UserError where there is no plan."""
    try:
        return LaunchPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not what `rl-jax render` writes"
        raise UserError(f"{path}: no plan of a launch ({why})") from None


Member = tuple[RoleGroup, Process]


def _mine(plan: LaunchPlan, name: str | None, host: int | None, rank: int) -> Sequence[Member]:
    """What this machine, or this pod, plays."""
    if (name is None) == (host is None):
        raise UserError("rl-jax role: needs NAME or --host N")
    if name is not None:
        group = plan.group(name)
        found = [(group, process) for process in group.processes if process.rank == rank]
        if not found:
            raise UserError(f"{name} has {len(group.processes)} processes, so no rank {rank}")
        return found
    found = [] if host is None else list(members(plan, host))
    if not found:
        raise UserError(
            f"--host {host}: nothing stands there; the plan has {len(plan.hosts)} hosts"
        )
    return found


def _await_run(run_dir: Path, deadline_s: float) -> None:
    """Whoever leads makes the directory, on a disk that is shared."""
    deadline = time.monotonic() + deadline_s
    while not (run_dir / "FORMAT").is_file():
        if time.monotonic() > deadline:
            raise UserError(
                f"{run_dir} is not there after {deadline_s:g} s: the host of the trainer's first "
                "process makes it; do both see the same disk?"
            )
        time.sleep(LOOK_S)


async def _supervise(plan: LaunchPlan, site: Site, mine: Sequence[Member], run_dir: Path) -> bool:
    """Whether the run came to its end here."""
    # One journal has one writer, and pods may share a host's index.
    number = [process for group in plan.groups for process in group.processes].index(mine[0][1])
    log = open_log(run_dir, f"supervisor-{number}", Clock())
    engine = LocalEngine(run_dir)
    supervisor = Supervisor(
        engine,
        _kept(plan, site, mine, run_dir),
        grace_s=max(group.deadlines.stop_s for group, _ in mine),
        on_started=partial(_started, log),
        on_ended=partial(_ended, log),
    )
    looking = asyncio.create_task(_look(supervisor, run_dir))
    try:
        return await supervisor.run()
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        await engine.close()
        await log.close()


async def _look(supervisor: Supervisor, run_dir: Path) -> None:
    """Shows that this loop turns, and stops when the run is over."""
    alive = os.environ.get(ALIVE)
    while not (run_dir / DONE).is_file():
        if alive:
            Path(alive).touch()
        await asyncio.sleep(LOOK_S)
    supervisor.stop()


def _kept(plan: LaunchPlan, site: Site, mine: Sequence[Member], run_dir: Path) -> list[Kept]:
    """In the order in which they are told to end: the trainer first, so its queue is whole."""
    began = time.time() - seconds_on_record(run_dir)
    where = addresses_of(plan, site.hosts)
    only_samplers = all(group.kind == "sampler" for group, _ in mine)
    groups = {group.name: group for group, _ in mine}
    kept: list[Kept] = []
    for group in groups.values():
        own = [process for other, process in mine if other.name == group.name]
        role = Role(group.name, run_dir, began, where, site.token, placed=True)
        # Several hosts of one world write logs into one directory.
        name = group.name if own[0].rank == 0 else f"{group.name}.{own[0].rank}"
        spec = GroupSpec(name, specs_of(group, own, role, site), grace_s=group.deadlines.stop_s)
        alone = group.restarted_with == "host"
        restart = Restart(group.restarts if alone else 0, group.window_s, BACKOFF_S)
        ends = group.kind != "sampler" or only_samplers
        kept.append(Kept(name, partial(_same, spec), restart, essential=True, ends_run=ends))
    return kept


def _same(spec: GroupSpec, attempt: int) -> GroupSpec:
    return spec


def _started(log: ProgramLog, role: str, pid: int) -> None:
    log.append(events.ProcessStarted(role, pid))
    print(f"rl-jax: {role} is pid {pid}", flush=True)


def _ended(log: ProgramLog, role: str, pid: int, code: int) -> None:
    log.append(events.ProcessEnded(role, pid, code))
    print(f"rl-jax: {role} (pid {pid}) ended with {code}", flush=True)


def _finish(run_dir: Path) -> None:
    from launch.code import config_of
    from launch.finish import finish
    from launch.summary import report

    summary = finish(config_of(run_dir), run_dir)
    print("\n".join(report(summary)), flush=True)
