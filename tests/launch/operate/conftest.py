"""A run that another process runs, and programs that stand in for a cluster's."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_jax.replay.log import write_format
from tests.structure.source import ROOT

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that has not begun."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('name = "small"\n[trainer]\nupdates = 40\n')
    write_format(run)
    return run


@pytest.fixture
def start(run: Path) -> Iterator[Start]:
    """Starts a process that runs `run`, and comes back when it does."""
    started: list[subprocess.Popen[str]] = []

    def begin(how: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.fakes.runner", str(run), how]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """`program(name, script)` puts a program on PATH; each call of one is a line of the file that
    comes back."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(name: str, script: str = "") -> Path:
        path = folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{calls}\n{script}\n')
        path.chmod(0o755)
        return calls

    return install
