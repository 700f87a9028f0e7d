"""A world that is asked to stop before its first update: in the middle of its warm start."""

import signal
from pathlib import Path

import pytest

from rl_jax.replay import events
from tests.drills.kills import configured
from tests.fakes.processes import alive
from tests.launch.test_roles import running, start, told, until

STOP_S = 60.0
"""Twice over: what is left 8 s after a stop is killed, as the statuses below tell."""


@pytest.mark.slow
def test_a_stop_in_a_warm_start(tmp_path: Path) -> None:
    """Both processes stop between the same two steps; none has to be killed."""
    config, run = tmp_path / "small.toml", tmp_path / "run"
    config.write_text(configured())
    log = run.with_suffix(".log")
    steps = ("warm_start.steps=400", "warm_start.trajectories=8")
    changed = [f"--set={change}" for change in steps]
    with running(start(run, "run", str(config), "--out", str(run), *changed)) as process:
        until(lambda: "warm start 100/400" in log.read_text(), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 128 + signal.SIGTERM
        assert "warm start 400" not in log.read_text()
    codes = {e.role: [] for e in told(run, events.ProcessStarted)}
    for ended in told(run, events.ProcessEnded):
        codes[ended.role].append(ended.code)
    assert sorted(codes["trainer"]) == [0, 128 + signal.SIGTERM]
    assert not any(alive(e.pid) for e in told(run, events.ProcessStarted))
