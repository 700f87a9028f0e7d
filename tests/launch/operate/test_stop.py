"""`rl-jax stop`: a run ends with a checkpoint wherever it was started, and no stranger does."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.cli import main
from launch.operate import stop
from launch.operate.place import STARTED, find, job_of
from launch.operate.running import RUNNING, Runner, of_process
from launch.report.data import is_running
from tests.launch.targets import golden
from tests.structure.source import ROOT


@pytest.mark.parametrize(
    ("how", "more", "status", "said"),
    [
        ("stops", [], 0, "stopped; go on with `rl-jax resume"),
        ("dies", [], 1, "ended without a checkpoint"),
        ("deaf", ["--wait", "0.5"], 1, "killed without a checkpoint"),
        ("deaf", ["--now"], 1, "killed without a checkpoint"),
    ],
)
def test_a_local_run(how, more, status, said, run: Path, start, capsys) -> None:
    process = start(how)
    # As a shell does: a process that is over is asked for its status.
    ending = threading.Thread(target=process.wait)
    ending.start()
    assert main(["stop", str(run), *more]) == status
    ending.join()
    assert said in capsys.readouterr().out
    assert process.returncode == (-signal.SIGKILL if how == "deaf" else 0)
    assert not is_running(run)


def test_what_does_not_run(run: Path, start, capsys) -> None:
    assert main(["stop", str(run)]) == 2
    assert f"{run} does not run: never started" in capsys.readouterr().err
    process = start("stops")
    process.kill()
    process.wait()
    assert main(["stop", str(run)]) == 2
    assert f"{run} does not run: crashed" in capsys.readouterr().err


def test_a_run_of_another_host_is_stopped_there(run: Path, start, capsys) -> None:
    process = start("stops")
    with (run / RUNNING).open("r+") as file:  # the same file, so that it stays locked
        elsewhere = Runner(process.pid, "elsewhere", 5)
        file.write(json.dumps(elsewhere._asdict()))
        file.truncate()
    assert main(["stop", str(run)]) == 2
    assert f"is run by pid {process.pid} on elsewhere: stop it there" in capsys.readouterr().err
    assert process.poll() is None and socket.gethostname() != "elsewhere"


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch, capsys) -> Iterator[Callable[[str, str], Path]]:
    monkeypatch.chdir(ROOT)

    def render(name: str, target: str) -> Path:
        golden.render(name, target, tmp_path / "out")
        capsys.readouterr()
        return tmp_path / "out"

    yield render


SCANCEL = """
case $* in
    *USR1*) [ {status} = silent ] ||
        echo "rl-jax job 7 attempt 0: ended with {status}" >>{out}/job-7.log ;;
    *) touch {out}/cancelled ;;
esac
"""
SQUEUE = "[ -e {out}/cancelled ] || echo {state}"
ASKED = "squeue --job {job} --noheader --format=%T"


@pytest.mark.parametrize(("ended", "status"), [(42, 0), (0, 0), (1, 1)])
def test_a_slurm_job(ended, status, rendered, program, capsys) -> None:
    out = rendered("qwen3_32b_h200_64", "slurm")
    (out / "job-7.log").write_text("rl-jax job 7 attempt 0: ended with 1\n")
    program("squeue", SQUEUE.format(out=out, state="RUNNING"))
    calls = program("scancel", SCANCEL.format(status=ended, out=out))
    assert main(["stop", str(out)]) == status
    asked = ASKED.format(job=7)
    assert calls.read_text().splitlines() == [
        asked, "scancel --signal=USR1 --batch 7", asked, "scancel 7", asked,
    ], "what it might queue again is cancelled"  # fmt: skip
    assert (out / "stop-7").exists(), "the job itself reads it"


def test_a_slurm_job_that_waits_or_does_not_answer(rendered, program, capsys) -> None:
    out = rendered("qwen3_32b_h200_64", "slurm")
    (out / STARTED).write_text('{"target": "slurm", "job": "9"}')
    program("squeue", SQUEUE.format(out=out, state="PENDING"))
    calls = program("scancel", SCANCEL.format(status="silent", out=out))
    asked = ASKED.format(job=9)
    assert main(["stop", str(out)]) == 0
    assert calls.read_text().splitlines() == [asked, asked, "scancel 9", asked]
    assert "job 9 was pending and is cancelled" in capsys.readouterr().out
    (out / "cancelled").unlink()
    calls.write_text("")
    program("squeue", SQUEUE.format(out=out, state="RUNNING"))
    assert main(["stop", str(out), "--wait", "0.5"]) == 1
    told = [call for call in calls.read_text().splitlines() if call.startswith("scancel")]
    assert told == ["scancel --signal=USR1 --batch 9", "scancel 9"]
    program("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert main(["stop", str(out)]) == 2
    assert "does not run: never started" in capsys.readouterr().err
    program("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert main(["stop", str(out)]) == 2
    assert "Unable to contact slurm controller" in capsys.readouterr().err
    program("squeue")
    assert main(["stop", str(out)]) == 2
    assert "does not run: never started" in capsys.readouterr().err


def test_the_newest_of_several_slurm_jobs(rendered, program, capsys) -> None:
    """The launch was gone on with by `sbatch job.sh`."""
    out = rendered("qwen3_32b_h200_64", "slurm")
    (out / STARTED).write_text('{"target": "slurm", "job": "9"}')
    for job, time in ((9, 5), (12, 30), (3, 6)):
        (out / f"job-{job}.log").touch()
        os.utime(out / f"job-{job}.log", (time, time))
    os.utime(out / STARTED, (7, 7))
    assert job_of(find(out)) == "12"
    os.utime(out / STARTED, (40, 40))
    assert job_of(find(out)) == "9"


def test_no_job_was_submitted(rendered, capsys) -> None:
    out = rendered("qwen3_32b_h200_64", "slurm")
    assert main(["stop", str(out)]) == 2
    assert "no job was submitted from" in capsys.readouterr().err


def test_a_jobset(rendered, program, capsys) -> None:
    out = rendered("kimi_linear_48b_v5p_128", "gke")
    there = "case $* in get*) echo jobset.jobset.x-k8s.io/a ;;"
    calls = program("kubectl", f"{there} esac")
    assert main(["stop", str(out), "--wait", "60"]) == 0
    asked, told = calls.read_text().splitlines()
    files = f"-f {out}/samplers.yaml -f {out}/trainer.yaml"
    assert asked == f"kubectl get --output=name --ignore-not-found {files}"
    assert told == f"kubectl delete --ignore-not-found {files} --cascade=foreground --timeout=60s"
    assert "its record is not on this machine" in capsys.readouterr().out
    # The trainer's manifest is gone when a sampler's pod is stuck.
    gone = f"[ -e {out}/gone ] && [[ $* != *ignore-not-found* ]] && [[ $* != *pods* ]] && exit 1"
    stuck = f'{there} *foreground*) touch {out}/gone; echo "timed out waiting" >&2; exit 1 ;; esac'
    program("kubectl", f"{gone}\n{stuck}")
    assert main(["stop", str(out)]) == 1
    assert sum(call.startswith("kubectl get") for call in calls.read_text().splitlines()) == 2
    *_, last = calls.read_text().splitlines()
    assert last == (
        "kubectl delete pods --grace-period=1 --selector "
        "app.kubernetes.io/instance=kimi-linear-48b-v5p-128"
    )
    program("kubectl")
    assert main(["stop", str(out)]) == 2
    assert "does not run: the cluster has nothing of its manifests" in capsys.readouterr().err
    program("kubectl", 'echo "Unable to connect to the server" >&2; exit 1')
    assert main(["stop", str(out)]) == 2
    assert "kubectl ended with 1: Unable to connect" in capsys.readouterr().err


def test_tpu_vms_need_who_keeps_them_going(rendered, start, capsys, monkeypatch) -> None:
    out = rendered("qwen3_8b_v6e_64", "tpu-vm")
    assert main(["stop", str(out)]) == 2
    assert "no babysit.sh was started in" in capsys.readouterr().err
    process = start("stops")
    (out / STARTED).write_text(json.dumps(of_process(process.pid)._asdict()))
    (out / "babysit.log").write_text("attempt 0 ended with 1\nattempt 1 ended with 42\n")
    ending = threading.Thread(target=process.wait)
    ending.start()
    assert main(["stop", str(out)]) == 0
    ending.join()
    assert process.returncode == 0
    assert main(["stop", str(out)]) == 2
    assert "does not run: not on this machine" in capsys.readouterr().err
    assert stop._statuses(out / "babysit.log", 0) == [1, 42]
