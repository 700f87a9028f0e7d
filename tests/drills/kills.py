"""SIGKILL to one process of a job under the stand-in for Slurm, at a moment drawn by a seed.

The job heals, with every update, group and rollout accounted for once; without restarts it fails
and names the role. `python -m tests.drills.kills --seeds 20` does so many and prints a line for
each.
"""

import argparse
import atexit
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.cli import main as rl_jax
from rl_jax.config.load import load
from rl_jax.replay import events
from rl_jax.replay.log import Entry
from tests.fakes.jobs import (
    DEADLINE_S,
    LOOK_S,
    Process,
    entries,
    kill,
    left_of,
    processes,
    said,
    small_job,
    submitted,
)
from tests.fakes.runs import Run, check_journal

PLACED = """
[mesh.trainer]
data = 4
[checkpoint]
every = 2
[processes]
restarts = {restarts}
trainers = 2
samplers = 2
[launch]
chip = "cpu"
trainer = {{ count = 2, devices = 3 }}
first_port = {port}
"""
"""A host of 3 devices holds one process of the world, which has 2, and a sampler."""
ROLES = ("trainer", "trainer.1", "orchestrator", "sampler-0", "sampler-1", "host 0", "host 1")
ALONE = ("orchestrator", "sampler-0", "sampler-1")
"""Started again on their own."""
EVENTS = 300
"""A run's journals have more, whatever the seed."""
BOUND_S = 15.0
"""A recovery that takes longer is slow."""


class Outcome(NamedTuple):
    """Of one drill; `wrong` is empty where all held."""

    role: str
    moment: int
    """Events on record at the kill."""
    status: int
    attempts: int
    recovery_s: float | None
    """From the kill until the role works again; None where it had nothing more to do."""
    wrong: str


def configured(restarts: int = 3) -> str:
    """The configuration's text, of a job with ports of its own."""
    port = 1100 + 613 * (os.getpid() % 11)
    return small_job("drill", 12, PLACED.format(port=port, restarts=restarts), warm_start=4)


def rendered(folder: Path, text: str) -> Path:
    """A directory to submit from."""
    config = folder / "drill.toml"
    config.write_text(text)
    out = folder / "rendered"
    assert rl_jax(["render", str(config), "--target", "slurm", "--out", str(out)]) == 0
    return out


def drill(seed: int, folder: Path, role: str | None = None, restarts: int = 3) -> Outcome:
    """One job with one kill, of `role` or of one that the seed draws, to its end."""
    draw = random.Random(seed)
    drawn, moment = draw.choice(ROLES), draw.randrange(EVENTS)
    role = role or drawn
    out = rendered(folder, configured(restarts))
    with submitted(out) as job:
        victim = None
        while victim is None and job.poll() is None:
            time.sleep(LOOK_S)
            if len(entries(out)) >= moment:
                victim = next((p for p in processes(out) if p.role == role), None)
        if victim is None:
            return Outcome(role, moment, job.wait(), 1, None, "ended before the kill\n" + said(out))
        moment = len(before := entries(out))
        kill(victim.pid)
        killed = time.monotonic()
        recovering = Recovery(role, before)
        recovery = None
        while job.poll() is None and time.monotonic() < killed + DEADLINE_S:
            if recovery is None and recovering.complete(entries(out)):
                recovery = time.monotonic() - killed
            time.sleep(LOOK_S)
        status = job.poll()
    attempts = len(list(out.glob("logs/attempt_*")))
    wrong = judge(out, victim, status, restarts)
    return Outcome(role, moment, -1 if status is None else status, attempts, recovery, wrong)


class Recovery:
    """Of a role that is killed after `before`: it is there again, then it does its own work.

    A world is started again as a whole and does an update. What another one does meanwhile, as the
    other sampler for the trainer, is no recovery.
    """

    def __init__(self, role: str, before: Sequence[Entry]) -> None:
        works = events.RolloutStarted if role == "orchestrator" else events.VersionApplied
        self._left: list[Callable[[Entry], bool]]
        if role in ALONE:
            self._left = [
                lambda e: isinstance(e.event, events.ProcessStarted) and e.event.role == role,
                lambda e: isinstance(e.event, works) and e.program == role,
            ]
        else:
            self._left = [
                lambda e: isinstance(e.event, events.RunStarted),
                lambda e: isinstance(e.event, events.UpdateDone),
            ]
        self._seen = sum(map(self._left[0], before))

    def complete(self, told: Sequence[Entry]) -> bool:
        """Whether all of it happened, each after the one before was `told`."""
        while self._left and sum(map(self._left[0], told)) > self._seen:
            del self._left[0]
            self._seen = sum(map(self._left[0], told)) if self._left else 0
        return not self._left


def judge(out: Path, victim: Process, status: int | None, restarts: int) -> str:
    """What is wrong with how the job ended. One kill is healed where there are `restarts`; the
    kill's own line in a log does not excuse that a job fails after them."""
    if left := left_of(out):
        return f"left: {left}\n{said(out)}"
    if status is None:
        return f"did not end\n{said(out)}"
    if status != 0 and restarts:
        return f"ended with {status} in spite of {restarts} restarts\n{said(out)}"
    if status != 0:
        named = re.search(rf"\b{victim.role}\b.* (ended with|was killed by)", said(out))
        return "" if named else f"ended with {status} and does not say why\n{said(out)}"
    run = Run(load(out / "config.toml"), out / "run", None, [])
    try:
        check_journal(run, killed=True)
        assert run.told(events.RunEnded)[-1].reason == "finished"
        summary = json.loads((out / "run" / "summary.json").read_text())
        assert summary["steps"] == run.config.trainer.updates
    except AssertionError:
        return f"the record is wrong\n{traceback.format_exc()}\n{said(out)}"
    return ""


def slow(outcome: Outcome, bound_s: float) -> bool:
    return outcome.recovery_s is not None and outcome.recovery_s > bound_s


def line(seed: int, outcome: Outcome, bound_s: float = BOUND_S) -> str:
    how = "healed" if outcome.status == 0 else f"failed with {outcome.status}"
    took = "-" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f} s"
    verdict = "SLOW" if slow(outcome, bound_s) else "ok"
    if outcome.wrong:
        verdict = "WRONG: " + outcome.wrong.splitlines()[0]
    place = f"at event {outcome.moment}"
    return (
        f"{seed:4}  {outcome.role:13}{place:15}{how:16}{outcome.attempts} attempts  "
        f"works again after {took:8}{verdict}"
    )


def keep_compiled() -> None:
    """All processes of all jobs share what was compiled, unless the user says where it is kept."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="compiled-")
        atexit.register(shutil.rmtree, folder)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="0 to N-1")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with this one")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="what is wrong stays here")
    parser.add_argument("--bound", type=float, metavar="SECONDS", help="a slower one is wrong")
    given = parser.parse_args()
    bound_s = BOUND_S if given.bound is None else given.bound
    keep_compiled()
    found: list[Outcome] = []
    for seed in range(given.first, given.seeds):
        with tempfile.TemporaryDirectory(prefix="drill-") as folder:
            outcome = drill(seed, Path(folder))
            if outcome.wrong and given.keep:
                shutil.copytree(folder, given.keep / f"seed-{seed}")
                (given.keep / f"seed-{seed}" / "wrong.txt").write_text(outcome.wrong)
        found.append(outcome)
        print(line(seed, outcome, bound_s), flush=True)
    good = sum(not outcome.wrong for outcome in found)
    took = [outcome.recovery_s for outcome in found if outcome.recovery_s is not None]
    print(f"{good} of {len(found)} healed, no process left")
    late = sum(slow(outcome, bound_s) for outcome in found)
    print(f"{late} slower than {bound_s:g} s, longest {max(took, default=0.0):.1f} s")
    return 0 if good == len(found) and (given.bound is None or not late) else 1


if __name__ == "__main__":
    sys.exit(main())
