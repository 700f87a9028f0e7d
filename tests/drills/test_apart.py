"""Trainer and sampler on two hosts of their own, with a network between them that can be cut."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from launch.cli import main
from rl_jax.config.load import load
from rl_jax.wire.silence import SILENT_S
from tests.fakes.jobs import small_job, updates_done
from tests.fakes.namespaces import ADDRESSES, Hosts, missing, two_hosts
from tests.fakes.runs import Run, check_journal
from tests.structure.source import ROOT

PLACED = """
[processes]
samplers = 1
restarts = 0
[deadlines]
start_s = 60.0
[launch]
chip = "cpu"
trainer = { count = 1, devices = 1 }
sampler = { count = 1, devices = 1 }
"""
DEADLINE_S = 400.0
LOOK_S = 0.1
START_S = 60.0

why_not = cache(missing)
pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


class Launch:
    """A plan that both hosts play."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        config, self.out = folder / "apart.toml", folder / "rendered"
        config.write_text(small_job("apart", 16, PLACED))
        assert main(["render", str(config), "--target", "slurm", "--out", str(self.out)]) == 0
        told = {"RL_JAX_HOSTS": ",".join(ADDRESSES), "RL_JAX_TOKEN": "a token"}
        env = os.environ | told | {"PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-m", "launch.cli", "role", "--plan", "plan.json", "--host"]
        self.played = [
            hosts.start(host, [*argv, str(host)], log=self.log(host), env=env, cwd=self.out)
            for host in (0, 1)
        ]

    def log(self, host: int) -> Path:
        return self.out / f"host-{host}.log"

    def said(self) -> str:
        logs = [self.log(0), self.log(1), *self.out.glob("run/logs/*.log")]
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs if log.exists())

    def until(self, holds: Callable[[], object], within_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, self.said()
            assert self.played[0].poll() is None, self.said()
            time.sleep(LOOK_S)

    def check_over(self) -> None:
        for host in self.played:
            assert host.wait(DEADLINE_S) == 0, self.said()
        check_journal(Run(load(self.out / "config.toml"), self.out / "run", None, []))
        assert sorted(set(updates_done(self.out))) == list(range(1, 17))


@contextmanager
def launched(hosts: Hosts, folder: Path) -> Iterator[Launch]:
    launch = Launch(hosts, folder)
    try:
        yield launch
    finally:
        for host in launch.played:
            host.kill()  # its processes end with it
            host.wait()


def test_two_hosts_to_the_end(hosts: Hosts, tmp_path: Path) -> None:
    with launched(hosts, tmp_path) as launch:
        launch.check_over()
    logs = launch.log(0).read_text(), launch.log(1).read_text()
    assert "trainer is pid" in logs[0] and "orchestrator is pid" in logs[0]
    assert "sampler-0 is pid" in logs[1] and "trainer" not in logs[1]


def test_a_cut_network_heals(hosts: Hosts, tmp_path: Path) -> None:
    """Long enough that each side notices that the other one is silent; then it comes back."""
    with launched(hosts, tmp_path) as launch:
        launch.until(lambda: len(updates_done(launch.out)) >= 4)
        hosts.cut()
        assert hosts.connections(0) and hosts.connections(1), "nobody is told"
        launch.until(
            lambda: not hosts.connections(0) and not hosts.connections(1),
            within_s=SILENT_S + 15.0,
        )
        hosts.mend()
        launch.check_over()


def test_a_network_that_stays_cut_ends_the_run_loudly(hosts: Hosts, tmp_path: Path) -> None:
    with launched(hosts, tmp_path) as launch:
        launch.until(lambda: len(updates_done(launch.out)) >= 4)
        hosts.cut()
        trainers, samplers = launch.played
        try:
            assert trainers.wait(2 * SILENT_S + START_S + 60.0) == 1, launch.said()
        except subprocess.TimeoutExpired:
            pytest.fail(launch.said())
        samplers.send_signal(signal.SIGTERM)
        assert samplers.wait(DEADLINE_S) == 42, launch.said()
    said = launch.log(0).read_text()
    assert f"no sampler connected in {START_S:g} s: tcp:{ADDRESSES[1]}:" in said
