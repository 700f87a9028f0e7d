"""A job of the stand-in for Slurm, watched from outside: what it said, did, and left running."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rl_jax.replay import events
from rl_jax.replay.log import Entry, merged
from tests.fakes import slurm

DEADLINE_S = 900.0
LOOK_S = 0.05
GONE_S = 10.0
"""How long what a job's script waited with may outlive it."""


def small_job(name: str, updates: int, rest: str, warm_start: int = 0) -> str:
    """A configuration that takes seconds; `rest` has the sections of where it stands."""
    return f"""
name = "{name}"
seed = 3
[model]
width = 32
layers = ["mla"]
heads = 2
head_dim = 16
ffn = 64
[warm_start]
steps = {warm_start}
[trainer]
updates = {updates}
push_every = 2
groups = 2
group_size = 4
row_length = 128
rows_per_microbatch = 8
[sampler]
slots = 16
prefill_rows = 8
prefill_tokens = [64]
sessions = 32
[rollout]
in_flight = 16
[evaluation]
questions = 4
{rest}"""


class Process(NamedTuple):
    """One of a job. `role` is "trainer", "trainer.1", "orchestrator", "sampler-0", ..., "host 0"
    for who keeps those of a host, or empty for all else, as srun."""

    pid: int
    role: str


@contextmanager
def submitted(out: Path) -> Iterator[subprocess.Popen[str]]:
    """The job, from `sbatch` on; whatever happens, nothing is left of it."""
    env = slurm.install(out.parent / "bin", sys.executable)
    job = subprocess.Popen(
        ["sbatch", "job.sh"], cwd=out, env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        yield job
    finally:
        while left := processes(out):
            for process in left:
                kill(process.pid)
            job.poll()
            time.sleep(LOOK_S)
        job.wait()


def kill(pid: int) -> None:
    """KILL, where it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def batch_pid(out: Path) -> int:
    return int((out.parent / "bin" / "state" / "batch.pid").read_text())


def processes(out: Path) -> list[Process]:
    """All of the job that run now, by the variable that everything under `sbatch` inherits."""
    mark = f"FAKE_SLURM={out.parent / 'bin' / 'state'}"
    found: list[Process] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            env = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        # A process that is dead and not reaped has neither.
        if mark in env:
            told = dict(text.split("=", 1) for text in env if "=" in text)
            found.append(Process(int(folder.name), _role(argv, told)))
    return found


def left_of(out: Path) -> list[Process]:
    """What there is of a job that has ended, and stays."""
    deadline = time.monotonic() + GONE_S
    while (left := processes(out)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return left


def _role(argv: list[str], env: dict[str, str]) -> str:
    if "launch.roles.entry" in argv:
        rank = json.loads(env.get("RL_JAX_WORLD", "[0]"))[0]
        return json.loads(env["RL_JAX_ROLE"])[0] + (f".{rank}" if rank else "")
    if "launch.cli" in argv and "role" in argv:
        return f"host {argv[argv.index('--host') + 1]}"
    return ""


def said(out: Path) -> str:
    logs = sorted(out.glob("*.log")) + sorted(out.glob("logs/attempt_*/*.log"))
    logs += sorted(out.glob("run/logs/*.log"))
    return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)


def entries(out: Path) -> list[Entry]:
    """Of all programs, in the order of cause and effect; empty before there is a run."""
    return list(merged(out / "run")) if (out / "run" / "FORMAT").exists() else []


def journal(out: Path) -> list[events.Event]:
    """What `entries` say."""
    return [entry.event for entry in entries(out)]


def updates_done(out: Path) -> list[int]:
    return [event.step for event in journal(out) if isinstance(event, events.UpdateDone)]


def until(holds: Callable[[], object], job: subprocess.Popen[str], out: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert job.poll() is None, said(out)
        assert time.monotonic() < deadline, said(out)
        time.sleep(LOOK_S)


def ended(out: Path, attempt: int) -> list[str]:
    """What each host ended with, as it wrote it."""
    files = sorted((out / "logs" / f"attempt_{attempt}").glob("status-*"))
    return [file.read_text().strip() for file in files]
