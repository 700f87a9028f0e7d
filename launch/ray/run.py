"""[H] `rl-jax run --target ray`: a run whose roles stand on a Ray cluster, kept from here.

What is lost with a node is placed again, with everything else, and goes on from the record: other
roles know the addresses of those that moved. So does a run one of whose nodes is about to go.
"""

import argparse
import asyncio
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from launch.engine.base import GroupSpec
from launch.engine.keeper import LEASE_S
from launch.engine.ray import Displaced, RayEngine
from launch.failure import first_cause
from launch.processes import BACKOFF_S, WORLD_GRACE_S, note_end, note_start, relayed
from launch.ray.cluster import connected
from launch.ray.placement import Placement, as_placed, leaving
from launch.report.data import seconds_on_record
from launch.roles.base import Role
from launch.site import Site, addresses_of, specs_of
from launch.spec import WINDOW_S, LaunchPlan, RoleGroup, RunSpec, make_plan
from launch.stop import Stop, Stopped
from launch.supervisor import Restart, RoleFailed, Supervisor
from launch.supervisor import Role as Kept
from launch.terminal import Reporter, reporter
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import Clock, open_log

LOOK_S = 2.0
"""How often it is looked whether a node is about to go."""


class _Leaving(Displaced):
    """A node is about to go, and everything has ended in good order."""


class _Run(NamedTuple):
    config: RunConfig
    plan: LaunchPlan
    run_dir: Path
    token: str
    attempts: Iterator[int]
    """Of worlds: each takes other ports than those before it."""
    display: Reporter


def run(config: RunConfig, run_dir: Path, given: argparse.Namespace) -> int:
    """Runs `config`, or goes on with it where `run_dir` holds its record, on the cluster at
    `given.address`; `run_dir` is on a disk that its nodes see.

    0, or 1 where a role or a place is lost for good, told in one line. Raises Stopped where a
    signal ended it, with a checkpoint, and UserError.
    """
    from launch.finish import finish
    from launch.summary import report

    run_dir = run_dir.absolute()
    plan = make_plan(RunSpec(config, str(run_dir)))
    display = reporter(sys.stdout)
    own = _Run(config, plan, run_dir, secrets.token_hex(16), count(), display)
    try:
        with connected(given.address):
            asyncio.run(_keep(own))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    except RoleFailed as failed:
        print(f"rl-jax: {failed}", file=sys.stderr, flush=True)
        return 1
    finally:
        display.close()
    print("\n".join([*report(finish(config, run_dir)), f"written to {run_dir}"]))
    return 0


async def _keep(own: _Run) -> None:
    """To the end of the run, at as many places as that takes. A lost place counts against
    `processes.restarts`, one that was left on a notice does not."""
    policy = Restart(own.config.processes.restarts, WINDOW_S, BACKOFF_S)
    moves: list[float] = []
    delay_s = 0.0
    while True:
        try:
            return await _at_one_place(own, delay_s)
        except Displaced as error:
            delay_s = 0.0
            if not isinstance(error, _Leaving):
                now = asyncio.get_running_loop().time()
                backoff_s = policy.delay(moves, now)
                if backoff_s is None:
                    raise RoleFailed(
                        f"{error}, after {policy.max_restarts} new placements within {WINDOW_S:g} s"
                    ) from error
                # A node that cannot be reached may live on: by then what it had has ended.
                delay_s = max(backoff_s, LEASE_S)
                moves.append(now + delay_s)
            own.display.note(f"{error}: everything is placed again and goes on from the record")


async def _at_one_place(own: _Run, delay_s: float) -> None:
    placement = Placement()

    async def reserve() -> None:
        await asyncio.sleep(delay_s)
        await placement.reserve(own.plan, own.config.deadlines.start_s, own.display.note)

    stop = Stop()
    stop.listen()
    try:
        if not await stop.waits_for(reserve()):
            raise Stopped(own.run_dir, stop.signal)
        stop.ignore()
        await _supervise(own, placement)
    finally:
        stop.ignore()
        placement.release()


async def _supervise(own: _Run, placement: Placement) -> None:
    plan, hosts = as_placed(own.plan, placement.berths)
    for group in plan.groups:
        on = ", ".join(hosts[process.host] for process in group.processes)
        own.display.note(f"{group.name} stands on {on}")
    engine = RayEngine(own.run_dir, placement.berths)
    log = open_log(own.run_dir, "supervisor", Clock())
    supervisor = Supervisor(
        engine,
        _kept(own, plan, hosts),
        grace_s=max(group.deadlines.stop_s for group in plan.groups),
        on_started=partial(note_start, log),
        on_ended=partial(note_end, log, own.display),
    )
    looking = asyncio.create_task(_look(placement, supervisor))
    try:
        async with relayed(own.run_dir / "logs", own.display):
            completed = await supervisor.run()
    finally:
        await engine.close()
        await log.close()
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
    if completed:
        return
    if supervisor.signal is None:
        raise _Leaving(f"node {looking.result()} is about to go, and the run has stopped")
    raise Stopped(own.run_dir, supervisor.signal)


async def _look(placement: Placement, supervisor: Supervisor) -> str:
    """Stops the run, with a checkpoint, when a node of its is about to go: the node's address."""
    while not (node := await asyncio.to_thread(leaving, placement.berths)):
        await asyncio.sleep(LOOK_S)
    supervisor.stop()
    return node


def _kept(own: _Run, plan: LaunchPlan, hosts: tuple[str, ...]) -> list[Kept]:
    """In the plan's order they are told to end: the trainer first, so its queue is whole."""
    began = time.time() - seconds_on_record(own.run_dir)
    where = addresses_of(plan, hosts)

    def spec(group: RoleGroup, attempt: int) -> GroupSpec:
        role = Role(group.name, own.run_dir, began, where, own.token, placed=True)
        alone = len(group.processes) == 1
        site = Site(hosts, own.token, 0 if alone else next(own.attempts))
        grace_s = group.deadlines.stop_s if alone else WORLD_GRACE_S
        return GroupSpec(group.name, specs_of(group, group.processes, role, site), grace_s)

    return [
        Kept(
            group.name,
            partial(spec, group),
            Restart(group.restarts, group.window_s, BACKOFF_S),
            essential=True,
            ends_run=group.kind != "sampler",
        )
        for group in plan.groups
    ]
