"""The scripts for TPU VMs against a stand-in for gcloud that runs what they mean for a machine."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.targets import golden
from tests.structure.source import ROOT

PLAYED = """#!/bin/sh
# The next status of this host, or the last one.
echo "$@ $RL_JAX_ATTEMPT $RL_JAX_HOSTS" >> "$CLOUD/played"
case "$*" in preflight*) exit 0 ;; *'--host 0') ;; *) exit 0 ;; esac
read -r status < "$CLOUD/statuses"
sed -i '2,$!{1d}' "$CLOUD/statuses"
exit "$status"
"""


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A rendered launch of 16 machines in `tmp_path`/rendered, and the environment of its user."""
    monkeypatch.chdir(ROOT)
    golden.render("qwen3_8b_v6e_64", "tpu-vm", tmp_path / "rendered")
    state, programs = tmp_path / "cloud", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    fake = (ROOT / "tests" / "fakes" / "gcloud.sh").read_text()
    for name, text in (("gcloud", fake), ("rl-jax", PLAYED)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CLOUD": str(state),
        "PROJECT": "p",
        "ZONE": "z-1-a",
        "SHARE": "nfs:/rl",
        "RENDERED": str(tmp_path / "on a shared disk"),
        "LOOK_S": "0",
    }


def kept_going(cloud: dict[str, str], *statuses: int) -> tuple[int, list[str]]:
    """Status of babysit.sh where the trainer's host ends with `statuses`; what roles were told."""
    state = Path(cloud["CLOUD"])
    (state / "statuses").write_text("".join(f"{status}\n" for status in statuses))
    script = state.parent / "rendered" / "babysit.sh"
    done = subprocess.run(["bash", script], env=cloud, capture_output=True, text=True, timeout=300)
    played = (state / "played").read_text().splitlines()
    return done.returncode, [line for line in played if line.startswith("role")]


def test_what_was_stopped_goes_on(cloud: dict[str, str]) -> None:
    status, played = kept_going(cloud, 42, 0)
    assert status == 0 and len(played) == 2 * 16
    hosts = [f"qwen3-8b-v6e-64-trainer-{i}" for i in range(8)]
    hosts += [f"qwen3-8b-v6e-64-sampler-{i}-0" for i in range(8)]
    assert f"role --plan plan.json --host 15 1 {','.join(hosts)}" in played
    calls = (Path(cloud["CLOUD"]) / "calls").read_text()
    assert calls.count("instance-groups managed create") == 9, "once, though asked for twice"
    assert "--machine-type=ct6e-standard-4t" in calls and "--accelerator-topology=4x8" in calls
    token = Path(cloud["RENDERED"]) / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 32
    assert token.read_text() not in calls


def test_a_mistake_is_not_tried_again(cloud: dict[str, str]) -> None:
    status, played = kept_going(cloud, 2, 0)
    assert status == 2 and len(played) == 16


def test_crashes_use_up_the_budget(cloud: dict[str, str]) -> None:
    status, played = kept_going(cloud, 1, 1, 1, 1, 0)
    assert status == 1 and len(played) == 4 * 16, "three restarts"


def test_a_container_is_its_command() -> None:
    entry = ROOT / "launch" / "container" / "entrypoint.sh"
    started = subprocess.Popen(
        ["bash", entry, "sh", "-c", 'echo "$$"; exit 42'], stdout=subprocess.PIPE, text=True
    )
    said, _ = started.communicate(timeout=60)
    assert int(said) == started.pid and started.returncode == 42
