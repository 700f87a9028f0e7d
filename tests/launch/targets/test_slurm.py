"""Whole runs under a stand-in for Slurm: the rendered script, real processes, two "nodes"."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from tests.fakes import slurm
from tests.fakes.compiling import QUICK_FLAGS
from tests.fakes.jobs import (
    DEADLINE_S,
    batch_pid,
    ended,
    left_of,
    said,
    small_job,
    submitted,
    until,
    updates_done,
)
from tests.fakes.processes import alive

PLACED = """
[checkpoint]
every = 2
[processes]
samplers = {samplers}
[launch]
first_port = {port}
trainer = {{ count = 1, devices = 1 }}
sampler = {{ count = 1, devices = {samplers} }}
"""

slow = pytest.mark.slow


def rendered(tmp_path: Path, updates: int, *more: str, samplers: int = 2) -> Path:
    """A directory to submit from."""
    port = 1100 + 613 * (os.getpid() % 11)
    config = tmp_path / "small.toml"
    config.write_text(small_job("small", updates, PLACED.format(port=port, samplers=samplers)))
    out = tmp_path / "rendered"
    assert main(["render", str(config), "--target", "slurm", "--out", str(out), *more]) == 0
    return out


def check_over(out: Path, updates: int) -> None:
    """Every update is on record, and neither a process nor the token is left anywhere."""
    summary = json.loads((out / "run" / "summary.json").read_text())
    assert summary["steps"] == updates
    assert sorted(set(updates_done(out))) == list(range(1, updates + 1))
    assert not left_of(out)
    token = out / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_bytes()
    files = [path for path in out.rglob("*") if path.is_file() and path != token]
    assert not [path for path in files if secret in path.read_bytes()]


def test_a_run_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {QUICK_FLAGS}")
    out = rendered(tmp_path, 2, samplers=1)
    with submitted(out) as job:
        assert job.wait(DEADLINE_S) == 0, said(out)
    check_over(out, 2)
    assert set(slurm.read_pids(out)) == {"trainer", "orchestrator", "sampler-0"}
    log = (out / "job-7.log").read_text()
    assert re.search(r"attempt 0: ended with 0$", log, re.MULTILINE)
    preflight = (out / "logs/latest/preflight-0.0.log").read_text()
    assert "equal on 2 hosts" in preflight and "a sum over them is right" in preflight


@slow
def test_components_of_a_heterogeneous_job(tmp_path: Path) -> None:
    out = rendered(tmp_path, 4, "--het-group")
    with submitted(out) as job:
        assert job.wait(DEADLINE_S) == 0, said(out)
    check_over(out, 4)


@slow
def test_a_notice_is_a_checkpoint_and_a_requeue(tmp_path: Path) -> None:
    out = rendered(tmp_path, 24)
    with submitted(out) as job:
        until(lambda: len(updates_done(out)) >= 6, job, out)
        os.kill(batch_pid(out), signal.SIGUSR1)
        assert job.wait(DEADLINE_S) == 0, said(out)
    log = (out / "job-7.log").read_text()
    assert "attempt 0: ended with 42" in log and "attempt 1: ended with 0" in log
    assert sorted(path.name for path in (out / "logs").iterdir()) == [
        "attempt_0", "attempt_1", "latest",
    ]  # fmt: skip
    assert ended(out, 0) == ["42", "42"], "both had the time to stop"
    assert ended(out, 1) == ["0", "0"]
    check_over(out, 24)


@slow
@pytest.mark.parametrize("role", ["sampler-1", "trainer", "orchestrator"])
def test_a_killed_role_heals_on_its_node(tmp_path: Path, role: str) -> None:
    out = rendered(tmp_path, 24)
    with submitted(out) as job:
        until(lambda: len(updates_done(out)) >= 6, job, out)
        os.kill(slurm.read_pids(out)[role], signal.SIGKILL)
        assert job.wait(DEADLINE_S) == 0, said(out)
    assert "attempt 0: ended with 0" in (out / "job-7.log").read_text()
    assert f"rl-jax: {role} (pid" in said(out) and "ended with -9" in said(out)
    check_over(out, 24)


@slow
def test_a_lost_node_is_a_requeue(tmp_path: Path) -> None:
    """SIGKILL to a node's supervisor: its roles die with it, the other node's are told to stop."""
    out = rendered(tmp_path, 24)
    with submitted(out) as job:
        until(lambda: len(updates_done(out)) >= 6, job, out)
        sampler = slurm.read_pids(out)["sampler-0"]
        status = Path(f"/proc/{sampler}/status").read_text()
        supervisor = int(re.findall(r"^PPid:\s+(\d+)$", status, re.MULTILINE)[0])
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: not alive(sampler), job, out)
        assert job.wait(DEADLINE_S) == 0, said(out)
    log = (out / "job-7.log").read_text()
    assert "host 1 ended with 137" in log and "attempt 1: ended with 0" in log
    check_over(out, 24)


PLAYED = """#!/bin/bash
# A role that does what its host's line of `plays` says, and "goes on" until TERM. None begins
# before both listen: TERM to one that does not yet, or a notice before there are two, is not heard.
attempt=$RL_JAX_ATTEMPT host=${!#} batch=$FAKE_SLURM/batch.pid
case $* in
    preflight*) [ -e during_preflight ] || exit 0
        rm during_preflight
        kill -USR1 "$(cat "$batch")"
        sleep 60 ;;
esac
trap 'sleep 0.3; echo told >"told-$attempt-$host"; exit 42' TERM
touch "began-$attempt-$host"
for ((i = 0; i < 3000; i++)); do
    if [ -e "began-$attempt-0" ] && [ -e "began-$attempt-1" ]; then
        play=$(sed -n "$((host + 1))p" "plays-$attempt")
        case $play in
            0) mkdir -p run; touch run/summary.json; exit 0 ;;
            [1-9]*) exit "$play" ;;
            notice) mkdir "noticed-$attempt" 2>/dev/null && kill -USR1 "$(cat "$batch")" ;;
        esac
    fi
    sleep 0.1
done
exit 3
"""


def played(
    tmp_path: Path, *attempts: str, trainers: int = 1, early: bool = False, restarts: int = 3
) -> tuple[int, str, Path]:
    """The job's status, what it said, and its directory, where its two hosts do as told in every
    attempt: what they end with or, with words, run until they are told."""
    out = rendered(tmp_path, 2, samplers=1)
    settings = (out / "job.env").read_text()
    settings = settings.replace("MAX_RESTARTS=3", f"MAX_RESTARTS={restarts}")
    if trainers == 2:
        settings = settings.replace("TRAINER_HOSTS=1", "TRAINER_HOSTS=2")
        settings = settings.replace("SAMPLER_HOSTS=1", "SAMPLER_HOSTS=0")
    (out / "job.env").write_text(settings)
    for index, plays in enumerate(attempts):
        (out / f"plays-{index}").write_text(plays.replace("/", "\n") + "\n")
    if early:
        (out / "during_preflight").touch()
    env = {**slurm.install(tmp_path / "bin", sys.executable), "LOOK_S": "0.1"}
    program = tmp_path / "bin" / "rl-jax"
    program.write_text(PLAYED)
    job = subprocess.run(["sbatch", "job.sh"], cwd=out, env=env, timeout=DEADLINE_S)
    return job.returncode, (out / "job-7.log").read_text(), out


def test_on_a_notice_all_hosts_have_the_time_to_stop(tmp_path: Path) -> None:
    status, said, out = played(tmp_path, "notice/goes on", "0/0")
    assert status == 0 and "attempt 0: ended with 42" in said and "attempt 1: ended with 0" in said
    assert sorted(path.name for path in out.glob("told-*")) == ["told-0-0", "told-0-1"]
    assert ended(out, 0) == ["42", "42"] and ended(out, 1) == ["0", "0"]


def test_a_notice_during_preflight_is_no_mistake(tmp_path: Path) -> None:
    status, said, out = played(tmp_path, "0/0", "0/0", early=True)
    assert status == 0 and "attempt 0: ended with 42" in said and "attempt 1: ended with 0" in said
    assert ended(out, 0) == []


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_crash_counts_though_others_stop(tmp_path: Path, trainers: int) -> None:
    """The other host says 42 each time; three restarts are all the same."""
    status, said, out = played(tmp_path, *["goes on/1"] * 4, trainers=trainers)
    assert status == 1 and said.count("ended with 1\n") == 8 and said.count("requeue") == 3
    assert "no more restarts" in said and ended(out, 3) == ["42", "1"]
    assert (out / "told-3-0").exists()


def test_a_notice_is_no_crash(tmp_path: Path) -> None:
    """One restart is allowed: notices need none, and the second crash is one too many."""
    plays = ["notice/goes on"] * 3 + ["goes on/1", "notice/goes on", "goes on/1"]
    status, said, _ = played(tmp_path, *plays, restarts=1)
    ends = re.findall(r"attempt \d: ended with (\d+)$", said, re.MULTILINE)
    assert ends == ["42", "42", "42", "1", "42", "1"] and said.count("requeue") == 5
    assert status == 1 and "no more restarts (MAX_RESTARTS=1)" in said


@pytest.mark.parametrize("plays", ["2/goes on", "goes on/2"])
def test_a_mistake_on_any_host_is_not_tried_again(tmp_path: Path, plays: str) -> None:
    status, said, _ = played(tmp_path, plays, trainers=2)
    assert status == 2 and "requeue" not in said


def test_what_srun_is_told() -> None:
    """The stand-in refuses as Slurm does, so that it can find a mistake."""
    fake = ["-m", "tests.fakes.slurm", "srun", "--nodelist=a,b,c"]
    for counts in (["--nodes=2", "--ntasks=3"], ["--nodes=3", "--ntasks=2"]):
        done = subprocess.run([sys.executable, *fake, *counts, "true"], capture_output=True)
        assert done.returncode == 1


def test_what_the_user_got_wrong_is_not_tried_again(tmp_path: Path) -> None:
    out = rendered(tmp_path, 2)
    (out / "token").write_text("open to all")
    (out / "token").chmod(0o644)
    with submitted(out) as job:
        assert job.wait(DEADLINE_S) == 2
    assert "so others may read the token: chmod 600 it" in said(out)
    assert "requeue" not in (out / "job-7.log").read_text()
    assert not (out / "run").exists()
