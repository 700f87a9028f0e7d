"""Whole runs whose programs are processes: real sockets, real signals, real pids."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.cli import main
from rl_jax.replay import events
from rl_jax.replay.log import merged
from rl_jax.snapshots.store import SnapshotStore
from tests.fakes.processes import alive
from tests.structure.source import ROOT

CONFIG = """
name = "small"
seed = 3
[model]
width = 32
layers = ["kda", "mla"]
heads = 2
head_dim = 16
ffn = 64
[warm_start]
steps = 0
[trainer]
updates = 24
push_every = 2
groups = 2
group_size = 4
row_length = 128
rows_per_microbatch = 8
[sampler]
slots = 16
prefill_rows = 8
prefill_tokens = [16, 64]
sessions = 32
[rollout]
in_flight = 16
[evaluation]
questions = 4
[checkpoint]
every = 2
[processes]
samplers = 2
"""
DEADLINE_S = 240.0
STOP_S = 10.0

slow = pytest.mark.slow


def start(run: Path, *argv: str) -> subprocess.Popen[bytes]:
    log = run.with_suffix(".log").open("ab")
    command = [sys.executable, "-m", "launch.cli", *argv, "--roles", "processes"]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


@contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever happens, nothing is left of it."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Looks again until it holds; the run must not end before."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.1)


def told[E: events.Event](run: Path, kind: type[E]) -> list[E]:
    if not (run / "FORMAT").exists():
        return []
    return [entry.event for entry in merged(run) if isinstance(entry.event, kind)]


def pids(run: Path) -> dict[str, int]:
    """The newest process of each role."""
    return {e.role: e.pid for e in told(run, events.ProcessStarted)}


def check_whole(run: Path) -> None:
    """Every prompt once, every attempt ended once, versions in order and on disk."""
    put = [e.group.prompt for e in told(run, events.GroupPut)]
    given_up = [e.group.prompt for e in told(run, events.GroupDiscarded)]
    taken = [g.prompt for e in told(run, events.BatchTaken) for g in e.groups]
    assert len(set(put)) == len(put) and not set(put) & set(given_up)
    assert len(set(taken)) == len(taken) == 24 * 2 and set(taken) <= set(put)
    begun = Counter(e.key for e in told(run, events.RolloutStarted))
    assert set(begun.values()) == {1}
    assert {key.prompt for key in begun} == set(range(1 + max(key.prompt for key in begun)))
    ends = told(run, events.RolloutDone) + told(run, events.RolloutLost)
    assert set(Counter(e.key for e in ends).values()) == {1}
    # Batches that a dead trainer had on record are done again under the same number.
    assert sorted({e.step for e in told(run, events.UpdateDone)}) == list(range(1, 25))
    versions = [e.version for e in told(run, events.VersionPublished)]
    assert versions == list(range(13)) == list(SnapshotStore(run / "snapshots").versions())
    assert [e.reason for e in told(run, events.RunEnded)][-1] == "finished"
    assert json.loads((run / "summary.json").read_text())["steps"] == 24


def replays(run: Path) -> str:
    command = [sys.executable, "-m", "launch.cli", "replay", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@slow
def test_a_killed_sampler_heals_and_a_stopped_run_goes_on(config: Path, tmp_path: Path) -> None:
    """SIGKILL to a sampler, then SIGINT to the run, then resume; at the end all is accounted for,
    and every update can be done again bit for bit."""
    run = tmp_path / "run"
    with running(start(run, "run", str(config), "--out", str(run))) as process:
        until(lambda: len(told(run, events.UpdateDone)) >= 4, process)
        first = pids(run)
        os.kill(first["sampler-0"], signal.SIGKILL)
        until(lambda: pids(run)["sampler-0"] != first["sampler-0"], process)
        until(lambda: len(told(run, events.UpdateDone)) >= 10, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 128 + signal.SIGINT
    assert not any(map(alive, pids(run).values())), "no orphan"
    assert told(run, events.ProcessEnded)[0].code == -signal.SIGKILL
    stopped = told(run, events.CheckpointSaved)[-1].step
    assert stopped == max(e.step for e in told(run, events.UpdateDone)) < 24

    with running(start(run, "resume", str(run))) as process:
        assert process.wait(DEADLINE_S) == 0
    check_whole(run)
    assert "24 updates and 13 versions rebuilt, every digest equal bit for bit" in replays(run)


@slow
def test_a_killed_trainer_heals(config: Path, tmp_path: Path) -> None:
    """Its supervisor starts it again; what it had on record after its checkpoint it does again."""
    run = tmp_path / "run"
    with running(start(run, "run", str(config), "--out", str(run))) as process:
        until(lambda: len(told(run, events.UpdateDone)) >= 7, process)
        os.kill(pids(run)["trainer"], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0
    assert -signal.SIGKILL in [e.code for e in told(run, events.ProcessEnded)]
    check_whole(run)
    assert "every digest equal bit for bit" in replays(run)


@slow
def test_a_killed_member_of_the_trainers_world_heals(config: Path, tmp_path: Path) -> None:
    """The trainer as two processes; the one without a queue is killed, both are started again, and
    another is asked to stop, which all do."""
    run = tmp_path / "run"
    changes = ("mesh.trainer.data=2", "processes.trainers=2", "trainer.weight_decay=0.1")
    changed = [f"--set={change}" for change in changes]
    with running(start(run, "run", str(config), "--out", str(run), *changed)) as process:
        until(lambda: len(told(run, events.UpdateDone)) >= 7, process)
        os.kill(pids(run)["trainer"], signal.SIGKILL)
        until(lambda: len(told(run, events.UpdateDone)) >= 12, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 128 + signal.SIGTERM
    assert -signal.SIGKILL in [e.code for e in told(run, events.ProcessEnded)]
    assert not any(alive(e.pid) for e in told(run, events.ProcessStarted)), "no orphan"
    with running(start(run, "resume", str(run))) as process:
        assert process.wait(DEADLINE_S) == 0
    check_whole(run)
    assert len({e.digest for e in told(run, events.VersionPublished)}) == 13
    # One process has other devices, so another fingerprint; here its bits are the same.
    assert replays(run).count("  equal\n") == 13


def test_a_port_in_use_is_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f'--set=processes.address="tcp:127.0.0.1:{port}"'
        argv = ["run", str(config), "--out", str(run), "--roles", "processes", address]
        assert main(argv) == 2
    said = capsys.readouterr().err
    assert f"port {port} cannot be had (Address already in use" in said and said.count("\n") == 1
    assert not run.exists()
