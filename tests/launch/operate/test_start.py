"""`rl-jax run --target`: a mistake starts nothing; what is started can be looked at and stopped."""

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from launch import start
from launch.cli import main
from launch.operate.place import STARTED, find
from launch.operate.running import Runner
from launch.ray import cluster
from tests.structure.source import ROOT

H200 = "configs/pods/qwen3_32b_h200_64.toml"
V6E = "configs/pods/qwen3_8b_v6e_64.toml"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in start.SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([H200, "--target", "nomad"], "invalid choice: 'nomad'"),
        ([H200, "--target", "slurm"], "--target slurm: needs --out DIR"),
        ([H200, "--target", "slurm", "--out", "{out}", "--roles", "processes"],
         "with --target slurm every role is a process"),
        ([V6E, "--target", "slurm", "--out", "{out}"], "--target slurm needs h200 or cpu"),
        ([H200, "--target", "slurm", "--out", "{out}", "--set", "trainer.groups=no"],
         'trainer.groups = "no": needs an integer'),
        ([H200, "--target", "slurm", "--out", "{out}", "--image", "x"],
         "--image: needs --target gke"),
        ([H200, "--target", "slurm", "--out", "{here}"], "exists and is left as it is"),
        ([V6E, "--target", "tpu-vm", "--out", "{out}"],
         "--target tpu-vm: PROJECT, ZONE, SHARE must be set"),
        ([H200, "--out", "{out}", "--het-group"], "--het-group: needs --target slurm"),
        ([H200, "--out", "{out}", "--run", "x"], "--run: needs --target slurm, gke, tpu-vm"),
        ([H200, "--out", "{out}", "--address", "x"], "--address: needs --target ray, not local"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_starts_nothing(
    argv, said, tmp_path: Path, program, capsys
) -> None:
    for name in start.NEEDED.values():
        calls = program(name[0])
    out = tmp_path / "out"
    assert main(["run", *(word.format(out=out, here=tmp_path) for word in argv)]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""
    assert not out.exists() and calls.read_text() == ""


def test_who_starts_it_must_be_here(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", H200, "--target", "slurm", "--out", str(tmp_path / "out")]) == 2
    assert "no sbatch here; `rl-jax render` writes the launch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_slurm(tmp_path: Path, program, capsys) -> None:
    calls = program("sbatch", "pwd; echo Submitted batch job 4711")
    out = tmp_path / "out"
    argv = ["run", H200, "--target", "slurm", "--out", str(out), "--set", "launch.first_port=7000"]
    assert main([*argv, "--het-group"]) == 0
    told = capsys.readouterr().out
    assert calls.read_text() == "sbatch job.sh\n"
    assert "first_port = 7000" in (out / "config.toml").read_text()
    assert "HET_GROUP=1" in (out / "job.env").read_text()
    assert told.splitlines()[1:] == [
        "started: job 4711",
        f"look: rl-jax status {out}",
        f"look: rl-jax logs {out} --follow",
        "look: squeue --job 4711",
        f"stop: rl-jax stop {out}",
    ]
    assert json.loads((out / STARTED).read_text()) == {"target": "slurm", "job": "4711"}


def test_a_refusal_is_one_line_and_the_launch_is_kept(tmp_path: Path, program, capsys) -> None:
    program("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    out = tmp_path / "out"
    assert main(["run", H200, "--target", "slurm", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "sbatch ended with 1: sbatch: error: invalid partition" in said
    assert f"cd {out} && sbatch job.sh" in said and said.count("\n") == 1
    assert not (out / STARTED).exists()


def test_gke(tmp_path: Path, program, capsys) -> None:
    calls = program("kubectl", "cat >/dev/null")
    out = tmp_path / "out"
    assert main(["run", V6E, "--target", "gke", "--image", "mine:1", "--out", str(out)]) == 0
    told = calls.read_text()
    assert "kubectl apply -f trainer.yaml" in told and "secret" in told
    assert "image: mine:1" in (out / "trainer.yaml").read_text()
    assert f"stop: rl-jax stop {out}" in capsys.readouterr().out


def test_tpu_vm(tmp_path: Path, program, monkeypatch, capsys) -> None:
    """It outlives who started it; `stop` ends it."""
    for name in start.SETTINGS:
        monkeypatch.setenv(name, "x")
    program("gcloud", "sleep 60 & wait")
    out = tmp_path / "out"
    assert main(["run", V6E, "--target", "tpu-vm", "--out", str(out)]) == 0
    started = find(out).started
    who = Runner(started["pid"], started["host"], started["born"])
    try:
        assert who.lives() and f"pid {who.pid}" in capsys.readouterr().out
    finally:
        os.killpg(who.pid, signal.SIGKILL)


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    out = tmp_path / "out"
    assert main(["run", "configs/quickstart.toml", "--target", "ray", "--out", str(out)]) == 2
    said = "rl-jax: --target ray: Ray is not installed (`make setup-cluster`)\n"
    assert capsys.readouterr().err == said
    assert not out.exists()


def test_ray_gets_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "prepare", lambda: None)
    made, seen = ModuleType("launch.ray.run"), []
    monkeypatch.setitem(sys.modules, "launch.ray.run", made)

    def run(config, run_dir, given) -> int:
        (run_dir / "metrics.jsonl").touch()
        seen.append((config.name, run_dir, given.address))
        return 42

    made.run = run
    out = tmp_path / "out"
    argv = ["run", "configs/quickstart.toml", "--target", "ray", "--address", "a:1"]
    assert main([*argv, "--out", str(out)]) == 42
    assert seen == [("quickstart", out, "a:1")] and (out / "FORMAT").is_file()
