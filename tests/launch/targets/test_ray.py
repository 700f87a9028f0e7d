"""Whole runs on a Ray cluster of two nodes, on one machine: real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rl_jax.replay import events
from rl_jax.replay.log import merged
from tests.fakes.jobs import small_job
from tests.fakes.processes import Watched, alive
from tests.fakes.ray import cluster, connected
from tests.structure.source import ROOT

PLACED = """
[mesh.trainer]
data = 2
[checkpoint]
every = 2
[processes]
trainers = 2
samplers = 2
[launch]
first_port = {port}
trainer = {{ count = 2, devices = 1 }}
sampler = {{ count = 2, devices = 1 }}
"""
DEADLINE_S = 400.0
ROLES = {"trainer", "orchestrator", "sampler-0", "sampler-1"}

pytestmark = pytest.mark.ray
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The head has no room for roles; two others have it."""
    folder = tmp_path_factory.mktemp("ray")
    with cluster(folder, {"num_cpus": 0}, {"num_cpus": 2}, {"num_cpus": 2}) as made:
        yield made


@contextmanager
def started(made: Any, out: Path, updates: int) -> Iterator[subprocess.Popen[bytes]]:
    """The driver of a run, or of its continuation; whatever happens, nothing is left of it."""
    port = 1100 + 613 * (os.getpid() % 11)
    (out / "small.toml").write_text(small_job("small", updates, PLACED.format(port=port)))
    argv = ["run", str(out / "small.toml"), "--out", str(out / "run")]
    if (out / "run").exists():
        argv = ["resume", str(out / "run")]
    argv += ["--target", "ray", "--address", made.address]
    with (out / "driver.log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *argv],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


def told[E: events.Event](out: Path, kind: type[E]) -> list[E]:
    if not (out / "run" / "FORMAT").exists():
        return []
    return [entry.event for entry in merged(out / "run") if isinstance(entry.event, kind)]


def said(out: Path) -> str:
    logs = [out / "driver.log", *sorted(out.glob("run/logs/*.log"))]
    return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)


def until(holds: Callable[[], bool], driver: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert driver.poll() is None, said(out)
        assert time.monotonic() < deadline, said(out)
        time.sleep(0.1)


def check_over(out: Path, updates: int) -> None:
    """Every update is on record, and no process is left."""
    assert json.loads((out / "run" / "summary.json").read_text())["steps"] == updates
    assert sorted({e.step for e in told(out, events.UpdateDone)}) == list(range(1, updates + 1))
    assert {e.role for e in told(out, events.ProcessStarted)} == ROLES
    assert not any(alive(e.pid) for e in told(out, events.ProcessStarted))


@slow
def test_a_run_of_two_nodes(nodes: Any, tmp_path: Path) -> None:
    with started(nodes, tmp_path, 4) as driver:
        assert driver.wait(DEADLINE_S) == 0, said(tmp_path)
    check_over(tmp_path, 4)


@slow
def test_a_removed_node_is_replaced(nodes: Any, tmp_path: Path) -> None:
    """With half of the trainer's world and a sampler on it; its replacement comes afterwards."""
    with started(nodes, tmp_path, 12) as driver:
        until(lambda: len(told(tmp_path, events.UpdateDone)) >= 4, driver, tmp_path)
        nodes.remove_node(min(nodes.worker_nodes, key=lambda node: node.node_id))
        until(lambda: "waiting for room" in said(tmp_path), driver, tmp_path)
        nodes.add_node(num_cpus=2)
        assert driver.wait(DEADLINE_S) == 0, said(tmp_path)
    assert "is lost: everything is placed again" in (tmp_path / "driver.log").read_text()
    assert "is lost, with its node" in said(tmp_path)
    check_over(tmp_path, 12)


@slow
def test_a_stopped_run_leaves_nothing_and_goes_on(nodes: Any, tmp_path: Path) -> None:
    with started(nodes, tmp_path, 12) as driver:
        until(lambda: len(told(tmp_path, events.UpdateDone)) >= 3, driver, tmp_path)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(DEADLINE_S) == 128 + signal.SIGTERM, said(tmp_path)
    assert not any(alive(e.pid) for e in told(tmp_path, events.ProcessStarted))
    done = max(e.step for e in told(tmp_path, events.UpdateDone))
    assert told(tmp_path, events.CheckpointSaved)[-1].step == done < 12
    with started(nodes, tmp_path, 12) as driver:
        assert driver.wait(DEADLINE_S) == 0, said(tmp_path)
    check_over(tmp_path, 12)


def test_nothing_outlives_a_killed_driver(nodes: Any, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.fakes.ray", nodes.address, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        watched = [Watched(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(watched) == 3
        driver.kill()
    assert all(each.gone() for each in watched)
    with connected(nodes):
        await_no_actor()


def await_no_actor() -> None:
    state = import_module("ray._private.state")
    deadline = time.monotonic() + 20.0
    while any(actor["State"] != "DEAD" for actor in state.actors().values()):
        assert time.monotonic() < deadline, state.actors()
        time.sleep(0.1)
