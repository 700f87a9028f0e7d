"""A Ray cluster on this machine: with a token, and nothing of it left afterwards.

As a program, `ray ADDRESS DIR`, a driver that starts processes and waits to be killed.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl_jax.replay.log import write_format
from tests.fakes.role import group, process

AUTH = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}
"""And a worker, so a role, has the priority of everybody else: by default others starve it."""
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000,
         "health_check_failure_threshold": 10, "prestart_worker_first_driver": False}  # fmt: skip
"""A node that is gone is known to be after seconds; nothing starts that nobody has asked for."""


def write_token(folder: Path) -> dict[str, str]:
    """The variables that every node and every driver of a cluster share. The token is always the
    same, as Ray reads it once in a process."""
    path = folder / "ray-token"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return {**AUTH, "RAY_AUTH_TOKEN_PATH": str(path)}


@contextmanager
def cluster(folder: Path, *nodes: Mapping[str, Any]) -> Iterator[Any]:
    """A `Cluster` with such nodes, the first of them its head; no driver is connected."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (`make setup-cluster`)")
    token = write_token(folder)
    before = {name: os.environ.get(name) for name in token}
    os.environ.update(token)
    from ray.cluster_utils import Cluster  # reads the variables

    spared = {"include_log_monitor": False, "no_monitor": True}
    head = {"include_dashboard": False, **spared, "_system_config": QUICK, **nodes[0]}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in nodes[1:]:
            made.add_node(**node)
        yield made
    finally:
        made.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def connected(made: Any) -> Iterator[None]:
    """This process is the cluster's driver."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
        for number, found in handlers.items():
            signal.signal(number, found)


async def hold(run_dir: Path) -> None:
    """A world of two with a grandchild, their pids printed as one line; then it waits."""
    from launch.engine.ray import RayEngine

    write_format(run_dir)
    world = await RayEngine(run_dir).start_group(group("world", process(), process("deaf")))
    grandchild = await world.call("grandchild", {}, deadline=60.0)
    print(*world.pids, grandchild, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    from launch.ray.cluster import connected as driver

    with driver(sys.argv[1]):
        asyncio.run(hold(Path(sys.argv[2])))
