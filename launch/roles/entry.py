"""[H] `python -m launch.roles.entry`: the process of one role, started by `launch/processes.py`.

Exit status as `rl-jax`: 0 done, 2 a mistake of the user's, told in the last line.
"""

import asyncio
import importlib
import os
import sys

from launch.cli import guarded, leave
from launch.engine.child import die_with_parent
from launch.roles.base import Role


def play(role: Role) -> int:
    """Runs the role's program to its end."""
    from launch import env
    from launch.code import config_of
    from rl_jax.config.run import check_devices

    config = config_of(role.run_dir)
    # The devices of a local run for every role: numerics, and so replay, are the same.
    env.prepare(config.devices_needed)
    check_devices(config, env.available_devices())

    from launch.failure import first_cause
    from launch.programs.base import build_parts
    from launch.terminal import PlainReporter

    parts = build_parts(config, role.run_dir, PlainReporter(sys.stdout), role.began)
    module = importlib.import_module(f"launch.roles.{role.name.partition('-')[0]}")
    try:
        asyncio.run(module.run(parts, role))
    except BaseExceptionGroup as group:
        stopped = first_cause(group)
    else:
        return 0
    raise stopped


if __name__ == "__main__":
    die_with_parent()
    leave(guarded(lambda: play(Role.from_env(os.environ))))
