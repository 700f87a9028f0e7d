"""[H] `python -m launch.roles.entry`: the process of one role, started by `launch/processes.py`.

Exit status as `rl-jax`: 0 done, 2 a mistake of the user's, told in the last line.
"""

import asyncio
import importlib
import io
import os
import sys
import traceback
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

from launch.cli import guarded, leave
from launch.engine.child import die_with_parent
from launch.engine.world import Place
from launch.roles.base import Role
from rl_jax.config.run import RunConfig, check_devices, check_own_devices

if TYPE_CHECKING:
    from rl_jax.trainer.world import World

HEARTBEAT_S = 10
"""How long a dead process of a world goes unnoticed where no connection tells of it."""


def play(role: Role) -> int:
    """Runs the role's program to its end."""
    from launch import env
    from launch.code import config_of

    config, place = config_of(role.run_dir), Place.from_env(os.environ)
    # The devices of a local run for every role: numerics, and so replay, are the same. In a world
    # each process has its part of the trainer's.
    env.prepare(config.mesh.trainer.size // place.size if place else config.devices_needed)

    from launch.failure import first_cause

    try:
        asyncio.run(_play(config, role, place))
    except BaseExceptionGroup as group:
        stopped = first_cause(group)
    else:
        return 0
    raise stopped


async def _play(config: RunConfig, role: Role, place: Place | None) -> None:
    import jax

    from launch import env
    from launch.programs.base import build_parts
    from launch.stop import Stopped
    from launch.terminal import PlainReporter

    stopped = None
    # Before anything asks jax for a device.
    async with _joined(config, role, place) as world:
        kind = role.name.partition("-")[0]
        if place is None and not role.placed:
            check_devices(config, env.available_devices())
        else:
            check_own_devices(config, kind, jax.local_device_count(), world.size)
        shown = io.StringIO() if world.process_id else sys.stdout
        parts = build_parts(config, role.run_dir, PlainReporter(shown), role.began, world)
        module = importlib.import_module(f"launch.roles.{kind}")
        try:
            await module.run(parts, role)
        except Stopped as error:
            stopped = error
    if stopped is not None:
        raise stopped


def _joined(
    config: RunConfig, role: Role, place: Place | None
) -> "AbstractAsyncContextManager[World]":
    from rl_jax.trainer.world import World

    if place is None:
        return nullcontext(World.single())
    return World.join(
        place.coordinator,
        place.size,
        place.process_id,
        channel=place.channel,
        token=role.token,
        join_s=config.deadlines.start_s,
        heartbeat_s=HEARTBEAT_S,
    )


def status_of(role: Role) -> int:
    """Of its program's end, a fault told with its traceback. The process must end at once then: at
    the interpreter's end jax would wait for the world, whose others end because of this one, and
    would be taken for the first to fail."""
    try:
        return guarded(lambda: play(role))
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    die_with_parent()
    leave(status_of(Role.from_env(os.environ)))
