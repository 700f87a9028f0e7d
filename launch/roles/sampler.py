"""[H] A sampler as a process: it follows the published versions and serves sequences."""

import asyncio
from functools import partial

from launch import build
from launch.background import in_background
from launch.programs.base import Parts
from launch.programs.sampler import LocalSampler, SamplerRecord, compile_sampler
from launch.record import spans_of
from launch.roles.base import Role
from launch.stop import Stop
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.sampler_server import serve_sampler
from rl_jax.sampler.engine import Weights
from rl_jax.sharding import param_shardings
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.snapshots.watch import Watcher


async def run(parts: Parts, role: Role) -> None:
    """Until TERM. Nothing is lost with a sampler: whoever it served is told, and asks again."""
    stop = Stop()
    stop.listen()
    mesh = build.build_sampler_mesh(parts.config, placed=role.placed)
    programs = await stop.unless(in_background(partial(compile_sampler, parts, mesh)))
    if programs is None:
        return
    record = SamplerRecord(parts, role.name)
    dispatcher = Dispatcher(role.name, on_span=spans_of(parts, record.trace, mesh))
    store = SnapshotStore(parts.run_dir / "snapshots")
    dtype = parts.config.sampler.param_dtype
    abstract = build.abstract_params(parts.model, mesh, dtype)
    address = role.addresses.samplers[int(role.name.removeprefix("sampler-"))]
    try:
        async with asyncio.TaskGroup() as background:
            shardings = param_shardings(parts.model.axes(), mesh)
            sampler = LocalSampler(parts, programs, dispatcher, shardings, record, background)

            async def swap(version: int, params: Tree) -> None:
                await sampler.take(Weights(version, params))

            watcher = Watcher(store, abstract, swap, version=-1)
            watching = background.create_task(watcher.run())
            if await stop.waits_for(sampler.applied(0)):
                serving = serve_sampler(
                    sampler, sampler.applied, address, token=role.token, clock=parts.clock
                )
                async with serving:
                    parts.reporter.note(f"{role.name} serves")
                    await stop.wait()
            watching.cancel()
            sampler.end()
    finally:
        dispatcher.close()
        await record.close()
