"""The quickstart as a job under the stand-in for Slurm: a world of two trainer processes, each on a
node of its own, and two samplers on a third.

`python -m tests.drills.learns --out DIR` prints the held-out solve rate before and after. It takes
minutes alone on a machine; `--set trainer.updates=4 --set warm_start.steps=20 --rise 0` only tries
it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from launch.cli import main as rl_jax
from rl_jax.config.load import load
from tests.drills.kills import keep_compiled
from tests.fakes.jobs import DEADLINE_S, left_of, said, submitted
from tests.fakes.runs import Run, check_journal
from tests.structure.source import ROOT

PLACED = (
    "mesh.trainer.data=2", "processes.trainers=2", "processes.samplers=2", 'launch.chip="cpu"',
    "launch.trainer={count=2,devices=1}", "launch.sampler={count=1,devices=2}",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--rise", type=float, default=0.2, help="least rise of the solve rate")
    parser.add_argument("--within", type=float, default=4 * DEADLINE_S, metavar="SECONDS")
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    out = given.out.absolute() / "rendered"
    changes = [f"--set={change}" for change in (*PLACED, *given.changes)]
    command = ["render", str(ROOT / "configs" / "quickstart.toml"), "--target", "slurm"]
    assert rl_jax([*command, "--out", str(out), *changes]) == 0
    keep_compiled()
    # Large pages for malloc, as the Makefile has them for the quickstart.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    began = time.monotonic()
    with submitted(out) as job:
        status = job.wait(given.within)
    took = time.monotonic() - began
    if status or (left := left_of(out)):
        print(said(out), f"ended with {status}" if status else f"left: {left}", sep="\n")
        return 1
    run = Run(load(out / "config.toml"), out / "run", None, [])
    check_journal(run)
    summary = json.loads((out / "run" / "summary.json").read_text())
    before, after = summary["solve_rate_before"], summary["solve_rate_after"]
    attempts = len(list(out.glob("logs/attempt_*")))
    print(
        f"held-out solve rate {before:.3f} -> {after:.3f} of {run.config.evaluation.questions} "
        f"questions, {summary['steps']} updates, lag at most {summary['max_lag']}; "
        f"{took:.0f} s, {attempts} attempt"
    )
    return 0 if after - before >= given.rise else 1


if __name__ == "__main__":
    sys.exit(main())
