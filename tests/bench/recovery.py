"""How long a world of two trainer processes takes from the death of one to its next update.

    python -m tests.bench.recovery [--kills 3] [--check]

A small run as processes on this machine; what is compiled is kept, as a launch keeps it. The
process that has the queue and the one that has not are killed in turn. With --check the exit status
is 1 where the median is above 15 s.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rl_jax.config.load import load
from rl_jax.replay import events
from tests.drills.kills import configured, keep_compiled
from tests.fakes.jobs import LOOK_S
from tests.fakes.runs import Run

BOUND_S = 15.0
DEADLINE_S = 600.0
BEFORE = 4
"""Updates that a world makes before the next kill."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    keep_compiled()
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        taken = recoveries(Path(folder), given.kills)
    print("| killed | next update after, s |\n|---|---|")
    for which, seconds in taken:
        print(f"| {which} | {seconds:.1f} |")
    middle = median(seconds for _, seconds in taken)
    print(f"median {middle:.1f} s, bound {BOUND_S:g} s")
    sys.exit(given.check and middle > BOUND_S)


def recoveries(folder: Path, kills: int) -> list[tuple[str, float]]:
    """Who was killed, and the seconds until the next update."""
    path, out = folder / "run.toml", folder / "run"
    path.write_text(configured(restarts=kills))
    command = [sys.executable, "-m", "launch.cli", "run", str(path), "--out", str(out)]
    command += ["--roles", "processes", "--set", "trainer.updates=1000"]
    command += ["--set", "checkpoint.every=2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found: list[tuple[str, float]] = []
    try:
        for number in range(kills):
            await_updates(out, process, BEFORE)
            started = [e.pid for e in told(out, events.ProcessStarted) if e.role == "trainer"][-2:]
            os.kill(started[number % 2], signal.SIGKILL)
            killed = time.monotonic()
            await_updates(out, process, 1)
            found.append((f"process {number % 2}", time.monotonic() - killed))
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
    return found


def told(out: Path, kind: type) -> list:
    return Run(load(out / "config.toml"), out, None, []).told(kind) if out.exists() else []


def await_updates(out: Path, process: subprocess.Popen[bytes], count: int) -> None:
    """Until so many more are on record than now."""
    wanted = len(told(out, events.UpdateDone)) + count
    deadline = time.monotonic() + DEADLINE_S
    while len(told(out, events.UpdateDone)) < wanted:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run ended with {process.poll()}, or makes no updates")
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
