"""`rl-jax logs`: ends of logs by role, and what comes until the run ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from tests.launch.targets import golden
from tests.structure.source import ROOT


@pytest.fixture
def logs(run: Path) -> Path:
    folder = run / "logs"
    folder.mkdir()
    (folder / "trainer-0.log").write_text("one\n\ntwo\nthree\n")
    (folder / "trainer-1.log").write_text("second of its world\n")
    (folder / "sampler-1-0.log").write_text("a sampler\n")
    (folder / "sampler-10-0.log").write_text("another\n")
    return folder


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["-n", "2"], "sampler-1: a sampler\nsampler-10: another\n"
         "trainer: two\ntrainer: three\ntrainer-1: second of its world\n"),
        (["trainer", "-n", "1"], "trainer: three\ntrainer-1: second of its world\n"),
        (["sampler-1"], "sampler-1: a sampler\n"),
        (["sampler"], "sampler-1: a sampler\nsampler-10: another\n"),
        (["-n", "0"], ""),
        (["trainer-1", "--follow"], "trainer-1: second of its world\n"),
    ],
)  # fmt: skip
def test_ends_of_logs(argv, told, run: Path, logs: Path, capsys) -> None:
    assert main(["logs", str(run), *argv]) == 0
    assert capsys.readouterr().out == told


def test_mistakes(run: Path, logs: Path, tmp_path: Path, capsys) -> None:
    assert main(["logs", str(run), "gateway"]) == 2
    known = "sampler-1, sampler-10, trainer, trainer-1"
    assert f"no log of gateway; there is {known}\n" in capsys.readouterr().err
    assert main(["logs", str(run), "-n", "-1"]) == 2
    capsys.readouterr()
    for log in logs.glob("*.log"):
        log.unlink()
    assert main(["logs", str(run)]) == 2
    assert "no logs: roles have them where they are processes" in capsys.readouterr().err


def test_followed_to_the_end_of_the_run(run: Path, logs: Path, start) -> None:
    process = start("stops")
    with (logs / "trainer-0.log").open("a") as log:
        log.write("fo")
        log.flush()
        argv = [sys.executable, "-m", "launch.cli", "logs", str(run), "trainer", "--follow"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        follower = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        assert follower.stdout is not None
        told = [follower.stdout.readline() for _ in range(4)]
        assert told[-1] == "trainer-1: second of its world\n"
        log.write("ur\n")
        log.flush()
        (logs / "sampler-1-0.log").write_text("a sampler\nis not asked for\n")
        assert follower.stdout.readline() == "trainer: four\n"
        log.write("five\n")
    process.terminate()
    assert process.wait() == 0
    rest, _ = follower.communicate(timeout=60)
    assert rest == "trainer: five\n" and follower.returncode == 0


def test_what_a_cluster_wrote_of_a_launch(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    golden.render("qwen3_32b_h200_64", "slurm", out := tmp_path / "out")
    (out / "logs" / "attempt_1").mkdir(parents=True)
    (out / "logs" / "latest").symlink_to("attempt_1")
    (out / "logs" / "latest" / "trainer-3.1.log").write_text("rl-jax: trainer.3 is pid 5\n")
    (out / "job-7.log").write_text("attempt 1: again\n")
    capsys.readouterr()
    assert main(["logs", str(out)]) == 0
    assert capsys.readouterr().out == (
        "trainer-3.1: rl-jax: trainer.3 is pid 5\njob-7: attempt 1: again\n"
    )
