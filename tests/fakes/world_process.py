"""One process of a trainer's world: `python -m tests.fakes.world_process '{"role": ..., ...}'`.

Role `spin`: updates without training until one of them is asked to stop; says "spinning" once.
Role `stuck` waits for good. Both import little, which half of such a process's time would go into.
"""

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from launch.stop import Stop
from rl_jax.trainer.world import Taken, World, shared_take
from rl_jax.trajectories.types import Group


async def spin(world: World) -> None:
    """Prints the update at which every process was told to stop."""
    taken, stop = Taken([Group("lookup", 0, ())], 0), Stop()
    stop.listen()

    async def same(update: int) -> Taken | None:
        return None if stop.asked else taken

    update = 1
    heard = {"asked": lambda: stop.asked, "ask": stop.ask}
    while await shared_take(world, same, update, deadline_s=30.0, **heard):
        update += 1
        if update == 3:
            print("spinning", flush=True)
    print(f"stopped at {update}", flush=True)


async def stuck(world: World) -> None:
    """Waits as in a collective: in a thread that nothing can end."""
    print("stuck", flush=True)
    await asyncio.to_thread(threading.Event().wait)


ROLES = {"spin": spin, "stuck": stuck}


async def main(text: str, role: Callable[..., Awaitable[None]] | None = None) -> None:
    """`text`: options of `World.join`, of which none is there for a world of one; a `role` of
    ROLES or, where one is given, the `out` that it gets."""
    options: dict[str, Any] = json.loads(text)
    more = {"out": options.pop("out")} if role else {}
    own = role or ROLES[options.pop("role")]
    joined: partial[AbstractAsyncContextManager[World]]
    joined = partial(World.join, **options) if options else partial(nullcontext, World.single())
    async with joined() as world:
        await own(world, **more)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
