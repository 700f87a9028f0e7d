"""Whole runs looked at and stopped from outside: real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.cli import main
from launch.operate.running import runner
from launch.report.data import is_running
from tests.launch.targets import test_slurm as slurm
from tests.launch.test_roles import CONFIG
from tests.structure.source import ROOT

DEADLINE_S = 400.0
pytestmark = pytest.mark.slow


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "launch.cli", *argv]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["status", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def until_update(run: Path, update: int, capsys: pytest.CaptureFixture[str]) -> dict:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = status(run, capsys) if (run / "FORMAT").is_file() else {"update": 0}
        if found["update"] >= update:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@pytest.mark.parametrize("roles", ["local", "processes"])
def test_a_run_of_this_machine(roles: str, tmp_path: Path, capsys) -> None:
    config, run = tmp_path / "c.toml", tmp_path / "run"
    config.write_text(CONFIG)
    with started("run", str(config), "--out", str(run), "--roles", roles) as process:
        found = until_update(run, 2, capsys)
        assert found["state"] == "running" and found["updates"] == 24
        told = {role["role"]: role["pid"] for role in found["roles"]}
        assert told["run"] == process.pid
        if roles == "processes":
            assert told.keys() == {"run", "trainer", "orchestrator", "sampler-0", "sampler-1"}
            assert main(["logs", str(run), "trainer"]) == 0
            assert capsys.readouterr().out.startswith("trainer: ")
        (telling,) = [subprocess.Popen([sys.executable, "-m", "launch.cli", "stop", str(run)])]
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert telling.wait(60) == 0
    found = status(run, capsys)
    assert found["state"] == "stopped" and 2 <= found["update"] < 24
    assert runner(run) is None and not is_running(run)
    assert main(["stop", str(run)]) == 2
    assert main(["watch", str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("update ")][-1].startswith(
        f"update {found['update']}/24"
    )


def test_a_job_of_slurm(tmp_path: Path, capsys, monkeypatch) -> None:
    """Stopped with a checkpoint on both nodes, and not queued again."""
    out = slurm.rendered(tmp_path, 400)
    with slurm.submitted(out) as job:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "bin" / "state"))
        slurm.until(lambda: len(slurm.updates_done(out)) >= 4, job, out)
        capsys.readouterr()
        found = status(out, capsys)
        assert found["state"] == "running" and found["more"] == ["squeue --job 7"]
        hosts = {role["role"]: role["host"] for role in found["roles"]}
        assert hosts["trainer"] == "host 0" and hosts["sampler-0"] == "host 1"
        assert main(["stop", str(out)]) == 0
        job.wait(60)
    assert "attempt 0: ended with 42" in (out / "job-7.log").read_text()
    assert not (out / "logs" / "attempt_1").exists()
    assert slurm.ended(out, 0) == ["42", "42"]
    assert f"{out / 'run'}: stopped\n" in capsys.readouterr().out
    assert status(out, capsys)["state"] == "stopped"
