"""Stand-ins for sbatch, srun, scontrol, squeue and scancel: they refuse what Slurm does not know.

`python -m tests.fakes.slurm NAME ARGUMENTS`, with FAKE_SLURM naming a directory for the state. An
allocation's nodes are loopback addresses: processes of different "nodes" talk over real sockets.
Variables that a batch system leaves behind, and that would mislead jax, are set as it does.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

JOB_OPTIONS = {
    "job-name", "signal", "requeue", "open-mode", "output", "nodes", "ntasks-per-node", "exclusive",
    "gpus-per-node",
}  # fmt: skip
STEP_OPTIONS = {
    "nodes", "ntasks", "ntasks-per-node", "nodelist", "het-group", "kill-on-bad-exit", "wait",
    "export", "output",
}  # fmt: skip
JOB = "7"


def state() -> Path:
    return Path(os.environ["FAKE_SLURM"])


def refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


def components(script: str) -> list[dict[str, str]]:
    """Options of the job's components. SystemExit for one that there is not."""
    found: list[dict[str, str]] = [{}]
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            text = line.removeprefix("#SBATCH ").strip()
            if text == "hetjob":
                found.append({})
                continue
            name, _, value = text.removeprefix("--").partition("=")
            if not text.startswith("--") or name not in JOB_OPTIONS:
                raise SystemExit(refuse(f"sbatch: unrecognized option '{text}'"))
            found[-1][name] = value
        elif line and not line.startswith("#"):
            break
    return found


def sbatch(arguments: list[str]) -> int:
    """Runs the job to its end, restarts included; the last status."""
    (path,) = arguments
    text = Path(path).read_text()
    if not text.startswith("#!"):
        return refuse("sbatch: This does not look like a batch script")
    parts = components(text)
    if not re.fullmatch(r"B:USR1@\d+", parts[0].get("signal", "")):
        return refuse("sbatch: Invalid --signal specification")
    spooled = state() / "slurm_script"
    shutil.copy(path, spooled)
    print(f"Submitted batch job {JOB}", flush=True)
    again = state() / "requeue"
    for restarts in range(100):
        if (state() / "cancelled").exists():
            return 0
        again.unlink(missing_ok=True)
        env = os.environ | {"SLURM_JOB_ID": JOB, "SLURM_LOCALID": "0", "PMI_RANK": "0"}
        if restarts:
            env["SLURM_RESTART_COUNT"] = str(restarts)
        first = 1
        for index, part in enumerate(parts):
            nodes = f"127.0.0.[{first}-{first + int(part['nodes']) - 1}]"
            first += int(part["nodes"])
            name = "SLURM_JOB_NODELIST"
            env[name if len(parts) == 1 else f"{name}_HET_GROUP_{index}"] = nodes
        output = Path(parts[0]["output"].replace("%j", JOB))
        with output.open("ab") as log:
            # In a session of its own, as slurmd does.
            batch = subprocess.Popen(
                ["bash", spooled], env=env, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        (state() / "batch.pid").write_text(str(batch.pid))
        status = batch.wait()
        if not again.exists():
            return status
    return refuse("sbatch: requeued without end")


def squeue(arguments: list[str]) -> int:
    """The job's state: it never waits, and nothing is left of it once it is cancelled."""
    if arguments != ["--job", JOB, "--noheader", "--format=%T"]:
        return refuse(f"squeue: invalid {arguments}")
    if not (state() / "cancelled").exists():
        print("RUNNING")
    return 0


def scancel(arguments: list[str]) -> int:
    """A signal to the batch script alone, or the end of the job, queued again or not."""
    batch = int((state() / "batch.pid").read_text())
    match arguments:
        case ["--signal=USR1", "--batch", job] if job == JOB:
            os.kill(batch, signal.SIGUSR1)
        case [job] if job == JOB:
            (state() / "cancelled").touch()
            if (state() / "requeue").exists():
                return 0
            with suppress(ProcessLookupError):
                os.killpg(batch, signal.SIGTERM)
        case _:
            return refuse(f"scancel: invalid {arguments}")
    return 0


def srun(arguments: list[str]) -> int:
    """One task on each of the step's nodes. USR1 and USR2 are passed on; TERM kills the tasks."""
    options: dict[str, str] = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).removeprefix("--").partition("=")
        if name not in STEP_OPTIONS:
            return refuse(f"srun: unrecognized option '--{name}'")
        options[name] = value
    nodes = options["nodelist"].split(",")
    if not arguments or not int(options["nodes"]) == len(nodes) == int(options["ntasks"]):
        return refuse(f"srun: error: {options} for {len(nodes)} nodes")
    groups = sorted(name for name in os.environ if "NODELIST_HET_GROUP" in name)
    if bool(groups) != ("het-group" in options):
        return refuse("srun: error: --het-group is for heterogeneous jobs, and they need it")
    lists = groups[int(options["het-group"])] if groups else "SLURM_JOB_NODELIST"
    if set(nodes) - set(expand(os.environ[lists])):
        return refuse(f"srun: error: Requested nodes not in {os.environ[lists]}")
    tasks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        send(tasks, number)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGTERM, lambda number, frame: send(tasks, signal.SIGKILL))
    for rank, _ in enumerate(nodes):
        env = os.environ | {
            "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(len(nodes)), "SLURM_LOCALID": "0",
            "SLURM_STEP_NODELIST": options["nodelist"], "PMIX_RANK": str(rank),
        }  # fmt: skip
        with Path(options["output"].replace("%n", str(rank))).open("ab") as log:
            tasks.append(subprocess.Popen(arguments, env=env, stdout=log, stderr=subprocess.STDOUT))
    return await_tasks(tasks, kill=options.get("kill-on-bad-exit") == "1")


def send(tasks: list[subprocess.Popen[bytes]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            task.send_signal(number)


def await_tasks(tasks: list[subprocess.Popen[bytes]], *, kill: bool) -> int:
    """The largest status; with `kill` the first task that fails ends the others."""
    while any(task.poll() is None for task in tasks):
        if kill and any(task.poll() for task in tasks):
            send(tasks, signal.SIGKILL)
        time.sleep(0.05)
    return max(code if code >= 0 else 128 - code for code in (task.returncode for task in tasks))


def expand(names: str) -> list[str]:
    found = re.fullmatch(r"(.*)\[(\d+)-(\d+)\]", names)
    if found is None:
        return [names]
    return [f"{found[1]}{i}" for i in range(int(found[2]), int(found[3]) + 1)]


def scontrol(arguments: list[str]) -> int:
    match arguments:
        case ["show", "hostnames", names]:
            print("\n".join(expand(names)))
        case ["requeue", job] if job == JOB:
            (state() / "requeue").touch()
        case _:
            return refuse(f"scontrol: invalid {arguments}")
    return 0


def install(folder: Path, python: str) -> dict[str, str]:
    """The commands, and `rl-jax`, as programs in `folder`; the environment that finds them."""
    folder.mkdir()
    own = folder / "state"
    own.mkdir()
    for name in ("sbatch", "srun", "scontrol", "squeue", "scancel"):
        _program(folder / name, f'exec "{python}" -m tests.fakes.slurm {name} "$@"')
    _program(folder / "rl-jax", f'exec "{python}" -m launch.cli "$@"')
    root = str(Path(__file__).resolve().parents[2])
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "FAKE_SLURM": str(own), "PYTHONPATH": root}


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def read_pids(run: Path) -> dict[str, int]:
    """The newest process of each role, by what the nodes' supervisors said."""
    found: dict[str, int] = {}
    for log in sorted((run / "logs").glob("attempt_*/*.log")):
        for line in log.read_text().splitlines():
            if hit := re.fullmatch(r"rl-jax: (\S+) is pid (\d+)", line):
                found[hit[1]] = int(hit[2])
    return found


if __name__ == "__main__":
    print(json.dumps(sys.argv), file=(state() / "calls").open("a"))
    commands = {
        "sbatch": sbatch, "srun": srun, "scontrol": scontrol, "squeue": squeue, "scancel": scancel,
    }  # fmt: skip
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
