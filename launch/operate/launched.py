"""[H] Who keeps a launch: a job of Slurm, what a cluster has of its manifests, babysit.sh.

It tells whether the launch goes on where no program of the run does: before the first attempt, and
between two.
"""

import shutil
import subprocess
from pathlib import Path

from launch.operate.place import Place, job_of
from launch.operate.running import Runner
from rl_jax.config.base import UserError

CALL_S = 60.0
"""Of a command of a cluster that only asks or tells."""


def called(*argv: str, wait_s: float = CALL_S, where: Path | None = None) -> str:
    """What a command of a cluster prints, called in the directory `where`. UserError, with its last
    line, where it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=wait_s, cwd=where)
    except FileNotFoundError:
        raise UserError(f"{argv[0]} is not here: call it where the launch was started") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{argv[0]} did not answer within {wait_s:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise UserError(f"{argv[0]} ended with {done.returncode}: {said}")
    return done.stdout


def state_of_job(job: str) -> str:
    """RUNNING, PENDING and so on; empty where Slurm has it no more."""
    try:
        said = called("squeue", "--job", job, "--noheader", "--format=%T")
    except UserError as error:
        if "Invalid job id" not in str(error):
            raise
        return ""  # it ended minutes ago
    return "".join(said.split()[:1])


def babysitter(place: Place) -> Runner | None:
    """Of a launch on TPU VMs; None where there was none."""
    told = place.started
    if not {"pid", "host", "born"} <= told.keys():
        return None
    return Runner(told["pid"], told["host"], told["born"])


def files_of(place: Place) -> list[str]:
    """The manifests of what runs, not those of the queue and of the disk, as kubectl's options."""
    found = [
        path for path in sorted((place.rendered or Path()).glob("*.yaml")) if path.stat().st_size
    ]
    mine = [path for path in found if path.name not in ("kueue.yaml", "shared.yaml")]
    return [name for path in mine for name in ("-f", str(path))]


def in_cluster(place: Place) -> bool:
    """Whether the cluster has something of the manifests."""
    asked = ("kubectl", "get", "--output=name", "--ignore-not-found")
    return bool(called(*asked, *files_of(place)).strip())


def lives(place: Place) -> bool:
    """Whether who keeps the launch is there; False also where it cannot be asked from this machine.
    UserError where it does not answer."""
    match place.target:
        case "slurm":
            job = job_of(place)
            return job is not None and _is_here("squeue") and bool(state_of_job(job))
        case "gke":
            return bool(place.started) and _is_here("kubectl") and in_cluster(place)
        case "tpu-vm":
            who = babysitter(place)
            return who is not None and who.here and who.lives()
        case _:
            return False


def _is_here(program: str) -> bool:
    return shutil.which(program) is not None


def in_words(place: Place) -> str:
    """Who keeps it, for people."""
    match place.target:
        case "slurm":
            return f"job {job_of(place)}"
        case "gke":
            return "its pods, which write here where the run's disk is (else: kubectl logs)"
        case "tpu-vm":
            return f"babysit.sh, pid {place.started.get('pid')}"
        case _:
            return "its roles"
