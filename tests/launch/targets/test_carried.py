"""Files of a user's own reach the hosts of a launch, whatever disk those see."""

import os
import subprocess
from pathlib import Path

import pytest

from launch import compose
from launch.cli import main
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from tests.launch.targets import golden
from tests.structure.source import ROOT

LOSS = """
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss

def own(scale: float = 0.5):
    return Loss(chain(policy_gradient()), token_mean)
"""
TASK = "def family(): return 'the task as it was'"
CHIPS = {"slurm": "h200", "gke": "h200", "tpu-vm": "v6e"}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a launch is to be rendered, from a directory with a loss and a task."""
    (tmp_path / "from" / "my files").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "from")
    Path("mine.py").write_text(LOSS)
    Path("my files/mine.py").write_text(TASK)
    return tmp_path / "out"


def rendered(target: str, out: Path, *settings: str) -> int:
    pod = golden.PODS / f"qwen3_8b_{CHIPS[target]}_{64 if target == 'tpu-vm' else 8}.toml"
    own = ["loss.recipe=mine.py:own", 'task.name="my files/mine.py:family"', *settings]
    more = [word for setting in own for word in ("--set", setting)]
    return main(["render", str(pod), "--target", target, "--out", str(out), *more])


def check_named(config: RunConfig) -> None:
    """Both are what they were where the launch was rendered."""
    compose.build_loss(config)
    assert config.loss.keywords == {"scale": 0.5}
    assert compose.imported(config.task.name, "task.name")() == "the task as it was"


def test_hosts_of_slurm_find_them_where_they_are(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered("slurm", out) == 0
    monkeypatch.chdir(out)  # as the job does
    check_named(load(Path("config.toml")))


def play(program: Path, text: str) -> None:
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


def test_pods_find_copies_in_what_they_mount(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered("gke", out) == 0
    plan = tmp_path / "plan"
    plan.mkdir()
    # What a pod mounts at /plan are the files of this map.
    mounts = 'for own; do case $own in --from-file=*) cp "${own#*=}" "$PLAN" ;; esac; done'
    reads = 'case "$*" in *stdin | "apply -f -") cat >/dev/null ;; esac'
    play(tmp_path / "bin" / "kubectl", f'case "$*" in get*) exit 1 ;; esac\n{mounts}\n{reads}')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PLAN": str(plan)}
    subprocess.run([out / "start.sh"], env=env, check=True, timeout=120)
    assert {file.name for file in plan.iterdir()} == {
        "plan.json", "config.toml", "loss.py", "task.py",
    }  # fmt: skip
    text = (plan / "config.toml").read_text()
    assert '"/plan/loss.py:own"' in text and '"/plan/task.py:family"' in text
    (plan / "config.toml").write_text(text.replace("/plan/", f"{plan}/"))
    monkeypatch.chdir("/")
    check_named(load(plan / "config.toml"))


def test_tpu_vms_find_copies_beside_the_plan(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rendered("tpu-vm", out) == 0
    (tmp_path / "cloud").mkdir()
    for group, count in [("trainer", 8), *((f"sampler-{i}", 1) for i in range(8))]:
        (tmp_path / "cloud" / f"qwen3-8b-v6e-64-{group}").write_text(f"{count}\n")
    play(tmp_path / "bin" / "gcloud", (ROOT / "tests" / "fakes" / "gcloud.sh").read_text())
    play(tmp_path / "bin" / "rl-jax", 'pwd >>"$CLOUD/played"')
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CLOUD": str(tmp_path / "cloud"),
        "PROJECT": "p",
        "ZONE": "z-1-a",
        "RENDERED": str(tmp_path / "on a shared disk"),
    }
    subprocess.run([out / "start.sh"], env=env, check=True, timeout=300)
    (where,) = set((tmp_path / "cloud" / "played").read_text().splitlines())
    assert where == env["RENDERED"]
    monkeypatch.chdir(where)
    check_named(load(Path("config.toml")))


@pytest.mark.parametrize("target", ["gke", "tpu-vm"])
@pytest.mark.parametrize("key", ["task.tokenizer", "warm_start.snapshot", "teachers.one"])
def test_a_directory_that_hosts_do_not_see_is_refused(
    target: str, key: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rendered(target, out, f"{key}=kept/0") == 2
    assert capsys.readouterr().err == (
        f'rl-jax: {key} = "kept/0": the hosts of --target {target} do not see this disk: needs the '
        "absolute path at which they find it, as /shared/kept/0\n"
    )
    assert not out.exists()


def test_a_directory_of_the_hosts_is_taken_as_it_is(out: Path) -> None:
    assert rendered("gke", out, "task.tokenizer=/shared/kept") == 0
    assert 'tokenizer = "/shared/kept"' in (out / "config.toml").read_text()


def test_one_file_of_two_names_is_carried_once(out: Path) -> None:
    Path("mine.py").write_text(f"{LOSS}\n{TASK}")
    assert rendered("gke", out, "task.name=mine.py:family") == 0
    text = (out / "config.toml").read_text()
    assert '"/plan/task.py:family"' in text and '"/plan/task.py:own"' in text
    assert [file.name for file in out.glob("*.py")] == ["task.py"]
