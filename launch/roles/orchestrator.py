"""[H] The orchestrator as a process: rollouts over samplers and a queue that are elsewhere."""

import asyncio
from contextlib import AsyncExitStack

from launch.link import Link
from launch.programs.base import Parts
from launch.programs.orchestrator import orchestrate
from launch.record import OrchestratorRecord
from launch.resume import is_finished
from launch.roles.base import Role
from launch.stop import Stop, Stopped
from rl_jax.gateway.sampler_client import SamplerPool, SocketSampler
from rl_jax.orchestrator.loop import Orchestrator
from rl_jax.queues.socket import SocketQueue

TELL_S = 0.2
"""How often a policy that waits for stragglers is told of them."""


async def run(parts: Parts, role: Role) -> None:
    """Until the trainer has ended and everything after it is done."""
    if await asyncio.to_thread(is_finished, parts.run_dir):
        return
    stop = Stop()
    stop.listen()
    link = Link(role.addresses.link, role.token, parts.clock)
    try:
        finished = await _orchestrate(parts, role, link, stop)
    finally:
        await link.close()
    if not finished:
        raise Stopped(parts.run_dir, stop.signal)


async def _orchestrate(parts: Parts, role: Role, link: Link, stop: Stop) -> bool:
    config, clock = parts.config, parts.clock
    again = await stop.unless(link.where(config.deadlines.start_s))
    if stop.asked:
        return False
    queue = SocketQueue(role.addresses.queue, token=role.token, clock=clock)
    samplers = tuple(
        SocketSampler(address, token=role.token, clock=clock, timeout=config.deadlines.step_s)
        for address in role.addresses.samplers
    )
    pool = SamplerPool(samplers, timeout=config.deadlines.start_s)
    record = OrchestratorRecord(parts, again)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(record.close)
        for connected in (queue, *samplers):
            closing.push_async_callback(connected.disconnect)
        async with asyncio.TaskGroup() as background:
            beside = [background.create_task(one.run()) for one in (pool, queue)]

            def watch(orchestrator: Orchestrator) -> None:
                if config.staleness.when_stale == "wait":
                    beside.append(background.create_task(_tell(orchestrator, link)))

            work = orchestrate(parts, pool, queue, aiter(link), pool.applied, record, again, watch)
            finished = await stop.waits_for(work)
            if finished:
                await link.done()
            for task in beside:
                task.cancel()
    return finished


async def _tell(orchestrator: Orchestrator, link: Link) -> None:
    while True:
        link.in_flight(orchestrator.oldest_in_flight())
        await asyncio.sleep(TELL_S)
