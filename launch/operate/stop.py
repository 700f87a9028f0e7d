"""[H] `rl-jax stop`: ends a run with a checkpoint, wherever it was started.

Exit status 0 where it ended by itself, 1 where it had to be killed, or left no checkpoint of its
end, 2 where it does not run.
"""

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.operate.launched import (
    CALL_S,
    babysitter,
    called,
    files_of,
    in_cluster,
    state_of_job,
)
from launch.operate.place import Place, find, job_of
from launch.operate.running import Runner, runner
from launch.operate.status import NEVER, state_in_words
from launch.report.data import entries, is_running
from launch.terminal import duration
from rl_jax.config.base import UserError

WAIT_S = 300.0
"""A trainer of a pod may take 240 s for its last checkpoint."""
REAP_S = 30.0
"""From KILL to the end of what the killed process had started."""
TELL_S = 10.0
LOOK_S = 0.2
CHECKPOINT = (0, 42)
"""What a launch ends with where its record is whole: done, or stopped to be started again."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("run", type=Path, metavar="RUN", help="of a run, or of a rendered launch")
    parser.add_argument(
        "--now", action="store_true", help="kill it; `resume` goes on from the last checkpoint"
    )
    parser.add_argument(
        "--wait", type=_seconds, default=WAIT_S, metavar="S",
        help=f"kill it where it has not ended after S seconds (default: {WAIT_S:g})",
    )  # fmt: skip


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number of seconds, 0 or more")
    return float(text)


def run(given: argparse.Namespace) -> int:
    """The exit status. UserError where nothing runs, or not here."""
    place = find(given.run)
    wait_s = 0.0 if given.now else given.wait
    if who := runner(place.run_dir):
        return _process(place, who, wait_s)
    match place.target:
        case "slurm":
            return _slurm(place, wait_s)
        case "gke":
            return _gke(place, wait_s)
        case "tpu-vm":
            return _tpu_vm(place, wait_s)
        case _:
            raise UserError(_does_not_run(place))


def _does_not_run(place: Place) -> str:
    if is_running(place.run_dir):
        return (
            f"{place.run_dir} runs, but `rl-jax run` did not start it: give the directory that "
            "its launch was rendered into"
        )
    return f"{place.run_dir} does not run: {_state(place)}"


def _state(place: Place) -> str:
    try:
        recorded = [entry.event for entry in entries(place.run_dir)]
    except ValueError as error:
        raise UserError(str(error)) from error
    return state_in_words(place, recorded)


def _process(place: Place, who: Runner, wait_s: float) -> int:
    """A run of this machine, in one process or several."""
    ended = _end(place, who, wait_s)
    deadline = time.monotonic() + REAP_S
    while is_running(place.run_dir) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return _judged(place, ended)


def _judged(place: Place, ended: bool) -> int:
    """What the record says of the end."""
    run_dir = place.run_dir
    if not run_dir.exists():
        where = "its record is not on this machine" if place.rendered else "start it again"
        why = "ended; " if place.rendered else "stopped before it wrote anything: "
        print(f"{run_dir}: {why if ended else 'killed; '}{where}")
        return 0 if ended else 1
    state = _state(place)
    if ended and state in ("stopped", "finished", NEVER):
        how = f"; go on with `rl-jax resume {run_dir}`" if place.rendered is None else ""
        print(f"{run_dir}: {state}{how if state == 'stopped' else ''}")
        return 0
    print(f"{run_dir}: {'ended' if ended else 'killed'} without a checkpoint of its end: started "
          "again it goes on from the last one")  # fmt: skip
    return 1


def _end(place: Place, who: Runner, wait_s: float) -> bool:
    """TERM, and KILL after `wait_s`, at once where that is 0. Whether it ended by itself."""
    if not who.here:
        raise UserError(f"{place.run_dir} is run by pid {who.pid} on {who.host}: stop it there")
    if wait_s and who.send(signal.SIGTERM) and _awaited(place, lambda: not who.lives(), wait_s):
        return True
    if not who.send(signal.SIGKILL):
        return bool(wait_s)
    if not _awaited(place, lambda: not who.lives(), REAP_S):
        raise UserError(f"pid {who.pid} did not end {REAP_S:g} s after KILL")
    return False


def _awaited(place: Place, over: Callable[[], bool], wait_s: float) -> bool:
    """Whether it was over within `wait_s`; tells now and then that it is waited for."""
    began = told = time.monotonic()
    while not over():
        now = time.monotonic()
        if now - began >= wait_s:
            return False
        if now - told >= TELL_S:
            told = now
            print(
                f"{place.run_dir}: waiting for its checkpoint, {duration(now - began)} of at most "
                f"{duration(wait_s)}", file=sys.stderr, flush=True,
            )  # fmt: skip
        time.sleep(LOOK_S)
    return True


def _slurm(place: Place, wait_s: float) -> int:
    """A notice as of the time limit, after which the job does not queue itself again."""
    job = job_of(place)
    if job is None or place.rendered is None:
        raise UserError(f"{place.run_dir} does not run: no job was submitted from {place.rendered}")
    state = state_of_job(job)
    if not state:
        raise UserError(_does_not_run(place))
    log = place.rendered / f"job-{job}.log"
    before = log.stat().st_size if log.is_file() else 0
    status: list[int] = []

    def over() -> bool:
        status[:] = _statuses(log, before)
        return bool(status)

    runs = state == "RUNNING"
    (place.rendered / f"stop-{job}").touch()
    if runs and wait_s:
        called("scancel", "--signal=USR1", "--batch", job)
        _awaited(place, over, wait_s)
    # One that does not answer, waits, or was queuing itself again just then.
    if not _awaited(place, lambda: _cancelled(job), CALL_S):
        raise UserError(f"job {job} is not cancelled after {CALL_S:g} s: scancel {job}")
    if not runs:
        print(f"job {job} was {state.lower()} and is cancelled")
        return 0
    return _judged(place, bool(status) and status[-1] in CHECKPOINT)


def _cancelled(job: str) -> bool:
    """Whether it is gone; else it is told to go."""
    state = state_of_job(job)
    if state and state != "COMPLETING":
        called("scancel", job)
    return not state


def _statuses(log: Path, start: int) -> list[int]:
    """What the attempts ended with that a launch's log tells of after `start` bytes."""
    said = log.read_bytes()[start:].decode(errors="replace") if log.is_file() else ""
    return [int(code) for code in re.findall(r"attempt \d+:? ended with (\d+)$", said, re.M)]


def _gke(place: Place, wait_s: float) -> int:
    """Deletes what runs; the cluster tells its pods by TERM, and waits as their grace says."""
    files = files_of(place)
    if not in_cluster(place):
        raise UserError(f"{place.run_dir} does not run: the cluster has nothing of its manifests")
    told = ["kubectl", "delete", "--ignore-not-found", *files]
    if not wait_s:
        return _killed_pods(place, told)
    print(f"deleting {len(files) // 2} files of manifests: pods have their grace", file=sys.stderr)
    try:
        called(*told, "--cascade=foreground", f"--timeout={wait_s:.0f}s", wait_s=wait_s + CALL_S)
    except UserError as error:
        print(f"rl-jax: {error}", file=sys.stderr)
        return _killed_pods(place, told)
    return _judged(place, ended=True)


def _killed_pods(place: Place, told: Sequence[str]) -> int:
    """Nothing is waited for; of what is `told` to go a part may be gone."""
    called(*told, "--wait=false")
    called("kubectl", "delete", "pods", "--grace-period=1", "--selector",
           f"app.kubernetes.io/instance={_name(place)}")  # fmt: skip
    return _judged(place, ended=False)


def _name(place: Place) -> str:
    from launch.gke.pods import name_of

    return name_of(place.plan) if place.plan else ""


def _tpu_vm(place: Place, wait_s: float) -> int:
    """Ends babysit.sh, which tells the hosts and waits for them."""
    who = babysitter(place)
    if who is None:
        raise UserError(f"{place.run_dir}: no babysit.sh was started in {place.rendered}")
    if not who.here:
        raise UserError(f"{place.run_dir} is run by pid {who.pid} on {who.host}: stop it there")
    log = (place.rendered or Path()) / "babysit.log"
    before = log.stat().st_size if log.is_file() else 0
    # The second notice has a signal of its own: two TERM that come together are one.
    if not who.send(signal.SIGTERM if wait_s else signal.SIGUSR2):
        raise UserError(_does_not_run(place))
    ended = bool(wait_s) and _awaited(place, lambda: not who.lives(), wait_s)
    if not ended:
        # Hosts are killed, which takes as many connections as there are.
        if wait_s:
            who.send(signal.SIGUSR2)
        if not _awaited(place, lambda: not who.lives(), WAIT_S):
            raise UserError(f"pid {who.pid}: babysit.sh does not end; see {place.rendered}")
    # Started by hand it prints elsewhere.
    statuses = _statuses(log, before)
    return _judged(place, ended and statuses[-1:] in ([], [0], [42]))
