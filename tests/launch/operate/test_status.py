"""What `rl-jax status` says of runs in every state."""

import asyncio
import json
import os
import re
import socket
from pathlib import Path

import pytest

from launch.cli import main
from launch.operate.running import recorded
from rl_jax.replay import events
from rl_jax.replay.log import Clock, open_log
from tests.fakes.record import made_run, write_run
from tests.launch.targets import golden
from tests.structure.source import ROOT


def status(path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["status", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def record(run: Path, program: str, *told: events.Event) -> None:
    async def write() -> None:
        log = open_log(run, program, Clock())
        for event in told:
            await log.append(event)
        await log.close()

    asyncio.run(write())


@pytest.mark.parametrize(
    ("ended", "state"), [("finished",) * 2, ("stopped",) * 2, (None, "crashed")]
)
def test_a_run_that_is_over(ended, state, tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run", made_run(ended=ended))
    found = status(run, capsys)
    assert (found["state"], found["update"], found["version"]) == (state, 40, 10)
    assert found["roles"] == [] and found["error"] is None and found["more"] == []


def test_before_and_while_it_runs(run: Path, start, capsys) -> None:
    assert status(run, capsys) == {
        "run": str(run), "state": "never started", "version": None, "update": 0, "updates": 40,
        "last_event_s": None, "roles": [], "error": None, "more": [],
    }  # fmt: skip
    process = start("stops")
    found = status(run, capsys)
    assert found["state"] == "running" and 0 <= found["last_event_s"] < 60
    assert [(role["role"], role["pid"]) for role in found["roles"]] == [("run", process.pid)]
    process.terminate()
    assert process.wait() == 0
    assert status(run, capsys)["state"] == "stopped"


def test_roles_and_who_ended_badly(run: Path, capsys) -> None:
    record(
        run,
        "supervisor",
        events.ProcessStarted("trainer", 11),
        events.ProcessStarted("sampler-0", 12),
        events.ProcessEnded("sampler-0", 12, -9),
        events.ProcessStarted("sampler-0", 13),
        events.ProcessEnded("trainer", 11, 1),
    )
    (run / "logs").mkdir()
    (run / "logs" / "trainer-0.log").write_text("update 7\nValueError: out of paper\n\n")
    (run / "logs" / "sampler-0-0.log").write_text("all is well\n")
    assert main(["status", str(run)]) == 0
    assert re.sub(r"last event \d+s ago", "last event 1s ago", capsys.readouterr().out) == (
        f"{run}: crashed, update 0/40\n"
        "last event 1s ago\n"
        "trainer    pid 11 on -  exit 1\n"
        "sampler-0  pid 13 on -  end not seen  started 2 times\n"
        "last error: ValueError: out of paper\n"
    )


def test_a_world_starts_once_and_tells_who_failed(run: Path, capsys) -> None:
    started, ended = events.ProcessStarted, events.ProcessEnded
    world = [started("trainer", 11), started("trainer", 12)]
    record(run, "supervisor", *world)
    (role,) = status(run, capsys)["roles"]
    assert (role["starts"], role["exit"]) == (1, None)
    record(run, "supervisor", ended("trainer", 11, 7), ended("trainer", 12, -15))
    (role,) = status(run, capsys)["roles"]
    assert (role["starts"], role["pid"], role["exit"]) == (1, 11, 7)
    record(run, "supervisor", started("trainer", 13), started("trainer", 14))
    (role,) = status(run, capsys)["roles"]
    assert (role["starts"], role["pid"], role["exit"]) == (2, 14, None)


def test_a_process_whose_end_nobody_wrote_is_not_the_roles_for_ever(run: Path, capsys) -> None:
    """Its supervisor was killed with it."""
    began = events.ProcessStarted
    record(run, "supervisor", began("trainer", 10))
    record(run, "supervisor", began("trainer", 20), events.ProcessEnded("trainer", 20, 1))
    record(run, "supervisor", began("trainer", 30))
    (role,) = status(run, capsys)["roles"]
    assert (role["pid"], role["exit"]) == (30, None)


@pytest.mark.parametrize("scattered", [False, True])
def test_the_drivers_host_is_not_that_of_a_clusters_roles(scattered, run: Path, capsys) -> None:
    record(run, "supervisor", events.ProcessStarted("sampler-0", 9))
    with recorded(run, scattered=scattered):
        own, role = status(run, capsys)["roles"]
    assert own["host"] == socket.gethostname()
    assert role["host"] == ("-" if scattered else own["host"])


def test_a_rendered_launch(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    golden.render("qwen3_32b_h200_64", "slurm", out)
    capsys.readouterr()
    found = status(out, capsys)
    assert found["state"] == "never started" and found["run"] == str(out / "run")
    assert found["more"] == ["squeue --name qwen3_32b_h200_64"]
    for job, line in ((7, "an older job"), (11, "rl-jax: no plan.json")):
        (out / f"job-{job}.log").write_text(f"{line}\n")
        os.utime(out / f"job-{job}.log", (job, job))
    found = status(out, capsys)
    assert found["more"] == ["squeue --job 11"] and found["error"] == "rl-jax: no plan.json"
    # Supervisors are numbered by their first process: the plan tells where it stands.
    plan = json.loads((out / "plan.json").read_text())
    hosts = [p["host"] for group in plan["groups"] for p in group["processes"]]
    number = next(i for i, host in enumerate(hosts) if host == 5)
    (out / "run").mkdir()
    (out / "run" / "config.toml").write_text((out / "config.toml").read_text())
    record(out / "run", f"supervisor-{number}", events.ProcessStarted("sampler-1", 9))
    for path in (out, out / "run"):
        (role,) = status(path, capsys)["roles"]
        assert (role["host"], role["pid"]) == ("host 5", 9)


def test_a_record_on_a_disk_of_the_cluster(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    golden.render("kimi_linear_48b_v5p_128", "gke", out := tmp_path / "out")
    capsys.readouterr()
    found = status(out, capsys)
    assert found["state"] == "not on this machine"
    name = "kimi-linear-48b-v5p-128"
    assert found["more"] == [f"kubectl get pods --selector app.kubernetes.io/instance={name}"]


def test_what_is_no_run_or_unreadable(tmp_path: Path, run: Path, capsys) -> None:
    assert main(["status", str(tmp_path / "none")]) == 2
    assert "none is no run: it has no config.toml" in capsys.readouterr().err
    (run / "FORMAT").write_text("rl_jax run 1\n")
    (run / "journal").mkdir()
    assert main(["status", str(run)]) == 2
    assert "a run of format 1; this version reads format 2" in capsys.readouterr().err
