"""What pods of GKE start: scripts and checks, with kubectl and `rl-jax` played."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from launch import preflight
from launch.cli import main
from tests.launch.targets import golden
from tests.structure.source import ROOT


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def play(program: Path, text: str) -> None:
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


def called(script: list[object], tmp_path: Path) -> list[str]:
    """The calls that programs in `tmp_path`/bin noted."""
    calls = tmp_path / "calls"
    calls.touch()
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(list(map(str, script)), env=env, check=True, timeout=120)
    return calls.read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "form", "launched", "secret"),
    [
        ("kimi_linear_48b_h200_8", "gke", ["trainer"], True),
        ("kimi_linear_48b_v5p_128", "lws", ["samplers", "trainer"], True),
        ("qwen3_8b_v6e_64", "rayjob", ["rayjob"], False),
        ("kimi_linear_48b_v5p_128", "pathways", ["pathways"], False),
    ],
)
def test_all_is_applied_after_what_it_needs(name, form, launched, secret, tmp_path: Path) -> None:
    golden.render(name, form, out := tmp_path / "out")
    play(
        tmp_path / "bin" / "kubectl",
        # It reads what is piped to it, or who writes there is told that nobody does.
        'echo "$*" >>"$CALLS"; '
        'case "$*" in get*) exit 1 ;; *stdin | "apply -f -") cat >/dev/null ;; esac',
    )
    calls = called([out / "start.sh"], tmp_path)
    own = name.replace("_", "-")
    assert (f"get secret {own}-token" in calls) == secret
    (made,) = [call for call in calls if call.startswith(f"create configmap {own}-plan")]
    assert ("--from-file=entry.sh" in made) != secret
    applied = [call for call in calls if call.startswith("apply -f") and call != "apply -f -"]
    assert applied == [
        "apply -f shared.yaml -f kueue.yaml",
        *(f"apply -f {file}.yaml" for file in launched),
    ]


def test_a_job_that_is_started_again_goes_on(tmp_path: Path) -> None:
    golden.render("qwen3_8b_v6e_64", "rayjob", out := tmp_path / "out")
    run = tmp_path / "shared"
    (out / "launch.env").write_text(f"NAME=x\nRUN={run}\nTARGET=ray\n")
    entry = tmp_path / "entry.sh"
    entry.write_text((out / "entry.sh").read_text().replace("/plan", str(out)))
    play(tmp_path / "bin" / "rl-jax", 'echo "$*" >>"$CALLS"')
    first = f"run {out}/config.toml --target ray --out {run}"
    assert called(["bash", entry], tmp_path) == [first]
    run.mkdir()
    (run / "FORMAT").touch()
    assert called(["bash", entry], tmp_path) == [first, f"resume {run} --target ray"]
    (run / "summary.json").touch()
    assert len(called(["bash", entry], tmp_path)) == 2, "it is finished"


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What the check before a role prints, played on this machine."""
    monkeypatch.setattr(preflight, "SHM_BYTES", 1)

    def check(job: str) -> str:
        out, run = tmp_path / "out", tmp_path / "shared" / "run"
        run.parent.mkdir()
        pod = "configs/pods/kimi_linear_48b_v5p_128.toml"
        assert main(["render", pod, "--target", "gke", "--out", str(out), "--run", str(run)]) == 0
        capsys.readouterr()
        (jobset,) = yaml.safe_load_all((out / "trainer.yaml").read_text())
        (own,) = [own for own in jobset["spec"]["replicatedJobs"] if own["name"] == job]
        (init,) = own["template"]["spec"]["template"]["spec"]["initContainers"]
        program, *argv = init["args"]
        assert program == "rl-jax"
        words = [
            w.replace("/plan/", f"{out}/").replace("$(JOB_COMPLETION_INDEX)", "7") for w in argv
        ]
        assert main(words) == 0
        assert not list(run.parent.iterdir()), "nothing is left"
        return capsys.readouterr().out

    return check


@pytest.mark.parametrize(("job", "ports"), [("trainer", "none needed"), ("driver", "7400, 7401")])
def test_the_check_before_a_role(job: str, ports: str, checked: Callable[[str], str]) -> None:
    """Alone: hosts that are not there yet are not waited for."""
    told = checked(job)
    heads = [line.partition(":")[0] for line in told.splitlines()]
    assert heads == ["ports", "shared memory", "store", "versions"]
    assert told.startswith(f"ports: {ports}")
