"""[H] The trainer as a process: it holds the queue and tells the orchestrator.

As several, process 0 does so, and the others follow it.
"""

import asyncio

from launch import build
from launch.env import fingerprint, fingerprint_digest
from launch.link import LinkServer
from launch.notices import Notices
from launch.programs.base import Parts
from launch.programs.follower import announce, follow, staying
from launch.programs.trainer import Trainer
from launch.programs.updates import Updates, prepare
from launch.record import TrainerRecord, spans_of
from launch.resume import Resumption, Rollouts, is_finished, resumption, rollouts_on_record
from launch.roles.base import Role
from launch.stop import Stop, Stopped
from rl_jax.dispatch import Dispatcher
from rl_jax.metrics import names
from rl_jax.queues.socket import QueueServer
from rl_jax.replay import events
from rl_jax.trainer.world import STOP_NOW, tell


async def run(parts: Parts, role: Role) -> None:
    """Until all updates are done and the orchestrator is, too. Stopped where TERM came first."""
    stop = Stop()
    stop.listen()
    if parts.world.process_id:
        await follow(parts, build.build_trainer_mesh(parts.config), stop)
    elif await asyncio.to_thread(is_finished, parts.run_dir):
        await announce(parts.world, None, over=True)
    else:
        await _lead(parts, role, stop)


async def _lead(parts: Parts, role: Role, stop: Stop) -> None:
    notices = Notices()
    found = await asyncio.to_thread(resumption, parts.run_dir)
    await announce(parts.world, found)
    opened: asyncio.Future[Trainer] = asyncio.get_running_loop().create_future()

    async def where() -> Rollouts | None:
        if found is None and not len(notices):
            return None
        # What a killed process had just put is on record from then on.
        done = (await opened).done
        return await asyncio.to_thread(rollouts_on_record, parts.run_dir, done)

    def in_flight() -> None:
        if opened.done():
            opened.result().queue.reconsider()

    link = LinkServer(notices, where, in_flight)
    async with link.serve(role.addresses.link, role.token, parts.clock):
        finished = await _train(parts, role, link, notices, found, stop, opened)
    if not finished:
        raise Stopped(parts.run_dir, stop.signal)


async def _train(
    parts: Parts,
    role: Role,
    link: LinkServer,
    notices: Notices,
    found: Resumption | None,
    stop: Stop,
    opened: asyncio.Future[Trainer],
) -> bool:
    mesh = build.build_trainer_mesh(parts.config)
    preparing = prepare(parts, mesh, stop, new=found is None)
    started = await (preparing if parts.world.peers else stop.unless(preparing))
    if started is None:
        return False
    weights, compiled = started
    record = TrainerRecord(parts, found)
    dispatcher = Dispatcher("trainer", on_span=spans_of(parts, record.trace, mesh))
    try:
        numerics = fingerprint_digest(fingerprint())
        await record.log.append(events.RunStarted(parts.config.seed, numerics, record.update))
        async with asyncio.TaskGroup() as background:
            trainer = Trainer(
                parts,
                Updates(parts, mesh, compiled, dispatcher),
                record,
                notices,
                dispatcher,
                stop,
                background,
                found,
                oldest_in_flight=link.oldest_in_flight,
            )
            opened.set_result(trainer)
            record.watch({names.QUEUE_DEPTH: lambda: len(trainer.queue)}, {"trainer": dispatcher})
            server = QueueServer(trainer.queue, token=role.token, clock=parts.clock)
            async with server.serve(role.addresses.queue):
                finished = await trainer.run(weights)
                # An orchestrator that is through already does not come back; one that dies does,
                # by its supervisor.
                if finished and not (found and "after" in found.rollouts.evaluated):
                    async with staying(parts.world):
                        finished = await stop.waits_for(link.done.wait())
        await record.log.append(events.RunEnded("finished" if finished else "stopped"))
        await tell(parts.world, STOP_NOW)
    finally:
        dispatcher.close()
        await record.close()
    return finished
