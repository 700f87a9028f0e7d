"""`rl-jax watch`: the lines of the terminal that runs it, from files."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from launch.operate.watch import Growing
from launch.terminal import PlainReporter
from rl_jax.metrics import names
from tests.fakes.record import made_run, write_run
from tests.launch.test_summary import SUMMARY
from tests.structure.source import ROOT


def line(step: int, **more: float) -> str:
    head = {names.STEP: step, names.POLICY_VERSION: 0, names.WALL_SECONDS: 10.0 * step}
    return json.dumps(head | more) + "\n"


def test_a_finished_run_as_its_terminal_showed_it(tmp_path: Path, capsys) -> None:
    made = made_run()
    run = write_run(tmp_path / "run", made)
    (run / "summary.json").write_text(SUMMARY.to_json())
    assert main(["watch", str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    shown = io.StringIO()
    live = PlainReporter(shown, clock=lambda: 0.0)
    live.phase("asynchronous RL", 40)
    for metrics in made.lines:
        live.update(metrics)
    without_eta = [text.partition("  eta ")[0] for text in told]
    wanted = [text.partition("  eta ")[0] for text in shown.getvalue().splitlines()]
    assert without_eta[:41] == wanted
    assert told[41].startswith("held-out solve rate") and len(told) > 43
    assert "  eta 0s" in told[40]


def test_the_time_left_is_the_runs_own(run: Path, capsys) -> None:
    """10 s an update, whenever it is looked at: 40 - 4 updates are six minutes."""
    (run / "metrics.jsonl").write_text("".join(line(step) for step in (1, 2, 3, 4)))
    assert main(["watch", str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[4].startswith("update 4/40") and told[4].endswith("eta 6m00s")
    assert told[5].startswith(f"{run}: never started, update 4/40")


def test_each_update_once_also_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    grown = Growing(path)

    def new() -> list[int]:
        return [told[names.STEP] for told in grown.new()]

    assert new() == []
    path.write_text(line(1) + line(2) + '{"st')
    assert new() == [1, 2] and new() == []
    with path.open("a") as file:
        file.write(line(3).removeprefix('{"st'))
    assert new() == [3]
    # Back to the checkpoint at 2, in a new file, and on.
    part = tmp_path / "metrics.part"
    part.write_text(line(1) + line(2))
    part.replace(path)
    assert new() == []
    with path.open("a") as file:
        file.write(line(3) + line(4))
    assert new() == [3, 4]


@pytest.mark.parametrize("logs", [True, False])
def test_until_the_run_ends(run: Path, start, logs: bool) -> None:
    process = start("stops")
    argv = [sys.executable, "-m", "launch.cli", "watch", str(run)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    watching = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert watching.stdout.readline() == "until the next update\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(7))
    assert watching.stdout.readline() == "asynchronous RL: 40 steps\n"
    assert watching.stdout.readline().startswith("update 7/40")
    if logs:
        (run / "logs").mkdir()
        (run / "logs" / "sampler-0-0.log").write_text("a word\n")
        assert watching.stdout.readline() == "sampler-0: a word\n"
    process.terminate()
    assert process.wait() == 0
    rest, _ = watching.communicate(timeout=60)
    assert rest.startswith(f"{run}: stopped, update 7/40") and watching.returncode == 0


def test_no_run(tmp_path: Path, capsys) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run: it has no config.toml" in capsys.readouterr().err
