"""A program with an engine of its own, to be signalled: `launcher WHAT DIR PIPE`.

`engine`: a few groups, one of which waits for PIPE, their pids printed as one JSON line; then it
waits to be killed. `supervisor`: one role that ends on TERM and one that ignores it and tells PIPE
so; prints their pids, then how they and the run ended.
"""

import asyncio
import json
import sys
from pathlib import Path

from launch.engine.local import LocalEngine
from launch.supervisor import Restart, Role, Supervisor
from tests.fakes.processes import Pipe
from tests.fakes.role import PAUSE, deaf, group, process

ONCE = Restart(0, 60.0, 0.0)


async def hold(run_dir: Path, pipe: str) -> None:
    """A world of two, one process that holds the GIL, one without the kernel's help, one not yet
    there, and two grandchildren."""
    engine = LocalEngine(run_dir)
    world = await engine.start_group(group("world", process(), process("deaf")))
    stuck = await engine.start_group(group("stuck", process("deaf")))
    late = await engine.start_group(group("late", process(pipe)))
    portable = await engine.start_group(group("portable", process("deaf", "portable")))
    grandchildren = [await g.call("grandchild", {}, deadline=60.0) for g in (portable, stuck)]
    held = Pipe(run_dir / "held")
    holding = asyncio.create_task(stuck.call("hold_the_gil", {"pipe": held.path}, deadline=60.0))
    assert await asyncio.to_thread(held.told)
    socket, _ = await world.call("control", {}, deadline=60.0)
    known = [*world.pids, *stuck.pids, *portable.pids, *grandchildren]
    print(json.dumps({"at once": known, "late": late.pids[0], "socket": socket}), flush=True)
    await holding


async def supervise(run_dir: Path, pipe: str) -> None:
    engine = LocalEngine(run_dir)
    specs = {
        "polite": group("polite", PAUSE),
        "deaf": group("deaf", deaf(pipe)),
    }
    roles = [Role(n, lambda _, s=s: s, ONCE, True, n == "polite") for n, s in specs.items()]
    supervisor = Supervisor(
        engine,
        roles,
        grace_s=60.0,
        on_started=lambda role, pid: print(role, pid, flush=True),
        on_ended=lambda role, pid, code: print(role, code, flush=True),
    )
    try:
        print("completed" if await supervisor.run() else "stopped", flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    what, directory, pipe = sys.argv[1:]
    asyncio.run((hold if what == "engine" else supervise)(Path(directory), pipe))
