"""A process that runs a run, seen from outside: `python -m tests.fakes.runner RUN HOW`.

HOW is what it does on TERM: "stops" with the run's end on record, "dies" without, is "deaf", or
"crashes" right away. It prints a line once it is there.
"""

import asyncio
import signal
import sys
from pathlib import Path

from launch.operate.running import recorded
from rl_jax.replay import events
from rl_jax.replay.log import Clock, open_log


async def play(run_dir: Path, how: str) -> None:
    stopped = asyncio.Event()
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    log = open_log(run_dir, "trainer", Clock())
    await log.append(events.RunStarted(3, "cpu", 0))
    if how == "crashes":
        raise ValueError("the seventh seal")
    print("there", flush=True)
    await stopped.wait()
    if how == "stops":
        await log.append(events.RunEnded("stopped"))
    await log.close()


if __name__ == "__main__":
    run_dir, how = Path(sys.argv[1]), sys.argv[2]
    with recorded(run_dir):
        asyncio.run(play(run_dir, how))
