"""`rl-jax logs`: ends of logs by role, and what comes until the run ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.cli import main
from launch.operate import logs as logs_of
from launch.operate.place import STARTED, find
from launch.operate.running import of_process
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


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[None]], None]:
    """What happens between two looks at the logs, a step each; the last one is the end."""

    def between(steps: Iterator[None]) -> None:
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: next(steps))
        monkeypatch.setattr(logs_of, "time", clock)
        monkeypatch.setattr(logs_of, "ASK_S", 0.0)

    return between


@pytest.fixture
def launch(tmp_path: Path, monkeypatch, capsys) -> Callable[[str, str], Path]:
    def render(name: str, target: str) -> Path:
        monkeypatch.chdir(ROOT)
        golden.render(name, target, tmp_path / "out")
        capsys.readouterr()
        return tmp_path / "out"

    return render


@pytest.mark.parametrize("end", ["summary", "cancelled"])
def test_a_job_is_followed_from_its_queue_through_its_attempts(
    end: str, launch, looks, program, capsys
) -> None:
    out = launch("qwen3_32b_h200_64", "slurm")
    (out / STARTED).write_text('{"target": "slurm", "job": "9"}')
    state = out / "state"
    state.write_text("PENDING\n")
    program("squeue", f"cat {state}")

    def attempt(number: int) -> None:
        logs = out / "logs"
        (logs / f"attempt_{number}").mkdir(parents=True)
        (logs / "latest").unlink(missing_ok=True)
        (logs / "latest").symlink_to(f"attempt_{number}")
        (logs / "latest" / f"trainer-3.{number}.log").write_text(f"attempt {number}\n")

    def steps() -> Iterator[None]:
        yield
        state.write_text("RUNNING\n")
        attempt(0)
        (out / "job-9.log").write_text("step trainer\n")
        yield
        state.write_text("PENDING\n")
        yield
        attempt(1)
        yield
        if end == "summary":
            run = find(out).run_dir
            run.mkdir(parents=True)
            (run / "summary.json").touch()
        else:
            state.write_text("")
        yield

    looks(steps())
    assert main(["logs", str(out), "--follow"]) == 0
    said = capsys.readouterr()
    assert said.out == "trainer-3.0: attempt 0\njob-9: step trainer\ntrainer-3.1: attempt 1\n"
    assert said.err == f"{out}: no logs yet: waiting for job 9\n"


def test_a_cluster_that_does_not_answer_is_asked_again(launch, looks, program, capsys) -> None:
    out = launch("qwen3_32b_h200_64", "slurm")
    (out / STARTED).write_text('{"target": "slurm", "job": "9"}')
    program("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')

    def steps() -> Iterator[None]:
        yield
        program("squeue")
        yield

    looks(steps())
    assert main(["logs", str(out), "--follow"]) == 0
    said = capsys.readouterr().err
    assert said.count("Unable to contact slurm controller; it is asked again\n") == 1


def test_tpu_vms_are_followed_while_babysit_lives(launch, looks, capsys) -> None:
    out = launch("qwen3_8b_v6e_64", "tpu-vm")
    keeping = subprocess.Popen(["sleep", "1000"])
    (out / STARTED).write_text(json.dumps(of_process(keeping.pid)._asdict()))
    log = out / "babysit.log"
    log.write_text("qwen3-8b-v6e-64-trainer is there\n")

    def steps() -> Iterator[None]:
        with log.open("a") as file:
            file.write("waiting for instances\n")
        yield
        keeping.kill()
        keeping.wait()
        with log.open("a") as file:
            file.write("no more restarts\n")
        yield

    def interrupted() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    try:
        looks(interrupted())
        assert main(["logs", str(out), "trainer", "--follow"]) == 130
        waits = f"{out}: no log of trainer yet: waiting for babysit.sh, pid {keeping.pid}\n"
        assert capsys.readouterr().err.startswith(waits)
        assert main(["logs", str(out), "trainee", "--follow"]) == 2
        assert "no log of trainee; there is babysit\n" in capsys.readouterr().err
        looks(steps())
        assert main(["logs", str(out), "--follow"]) == 0
    finally:
        keeping.kill()
        keeping.wait()
    assert capsys.readouterr().out.splitlines() == [
        "babysit: qwen3-8b-v6e-64-trainer is there",
        "babysit: waiting for instances",
        "babysit: no more restarts",
    ]


def test_pods_are_followed_while_the_cluster_has_them(launch, looks, program, capsys) -> None:
    out = launch("qwen3_8b_v6e_64", "gke")
    (out / STARTED).write_text('{"target": "gke"}')
    program("kubectl", "echo jobset.jobset.x-k8s.io/a")

    def steps() -> Iterator[None]:
        yield
        program("kubectl")
        yield

    looks(steps())
    assert main(["logs", str(out), "--follow"]) == 0
    assert "no logs yet: waiting for its pods" in capsys.readouterr().err
    assert main(["logs", str(out), "--follow"]) == 2
