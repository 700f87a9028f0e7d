"""[H] A whole run in one process: trainer and samplers on their own meshes, one event loop."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from launch import build
from launch.background import in_background
from launch.env import fingerprint, fingerprint_digest
from launch.failure import first_cause
from launch.notices import Notices
from launch.programs.base import Parts, build_parts
from launch.programs.orchestrator import orchestrate
from launch.programs.sampler import LocalSampler, SamplerRecord, compile_sampler
from launch.programs.trainer import Trainer
from launch.programs.updates import Compiled, Updates, Weights, prepare
from launch.record import OrchestratorRecord, TrainerRecord, spans_of
from launch.resume import Resumption, resumption
from launch.stop import Stop, Stopped
from launch.terminal import Reporter
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.metrics import names
from rl_jax.orchestrator.loop import Orchestrator
from rl_jax.replay import events
from rl_jax.sampler.programs import Programs as SamplerPrograms
from rl_jax.sharding import param_shardings


class _Started(NamedTuple):
    """What takes long before the first rollout: weights and programs."""

    weights: Weights | None
    """None where the run goes on."""
    trainer: Compiled
    sampler: SamplerPrograms


class _Local(NamedTuple):
    """The run's parts in this process."""

    parts: Parts
    meshes: build.Meshes
    record: TrainerRecord
    rollouts: OrchestratorRecord
    sampling: SamplerRecord
    trainer: Dispatcher
    sampler: Dispatcher


def run_local(
    config: RunConfig,
    run_dir: Path,
    reporter: Reporter,
    *,
    began: float,
) -> None:
    """Runs `config` in this process, from wherever its record in `run_dir` ends, to its end.

    `began`: when, by `time.time()`. Raises UserError before anything is written, Stopped where a
    signal ended the run, and whatever stopped a program: its own exception, not the group of all
    that followed.
    """
    parts = build_parts(config, run_dir, reporter, began)
    try:
        return asyncio.run(_run(parts, resumption(run_dir)))
    except BaseExceptionGroup as group:
        stopped = first_cause(group)
    raise stopped


async def _run(parts: Parts, found: Resumption | None) -> None:
    stop = Stop()
    stop.listen()
    try:
        finished = await _from_weights(parts, found, stop)
    finally:
        stop.ignore()
    if not finished:
        raise Stopped(parts.run_dir, stop.signal)


async def _from_weights(parts: Parts, found: Resumption | None, stop: Stop) -> bool:
    meshes = build.build_meshes(parts.config)
    started = await stop.unless(_start(parts, meshes, found, stop))
    if started is None:
        return False
    record = TrainerRecord(parts, found)
    again = found.rollouts if found else None
    rollouts, sampling = OrchestratorRecord(parts, again), SamplerRecord(parts, "sampler")
    own = _Local(
        parts,
        meshes,
        record,
        rollouts,
        sampling,
        Dispatcher("trainer", on_span=spans_of(parts, record.trace, meshes.trainer)),
        Dispatcher("sampler", on_span=spans_of(parts, sampling.trace, meshes.sampler)),
    )
    async with AsyncExitStack() as closing:
        for one in (record, rollouts, sampling):
            closing.push_async_callback(one.close)
        for dispatcher in (own.trainer, own.sampler):
            closing.callback(dispatcher.close)
        numerics = fingerprint_digest(fingerprint())
        await record.log.append(events.RunStarted(parts.config.seed, numerics, record.update))
        finished = await _learn(own, started, stop, found)
        await record.log.append(events.RunEnded("finished" if finished else "stopped"))
    return finished


async def _start(
    parts: Parts, meshes: build.Meshes, found: Resumption | None, stop: Stop
) -> _Started | None:
    async with asyncio.TaskGroup() as starting:
        trainer = starting.create_task(prepare(parts, meshes.trainer, stop, new=found is None))
        work = in_background(partial(compile_sampler, parts, meshes.sampler))
        sampler = starting.create_task(work)
    prepared = trainer.result()
    return _Started(*prepared, sampler.result()) if prepared else None


async def _learn(own: _Local, started: _Started, stop: Stop, found: Resumption | None) -> bool:
    parts, notices = own.parts, Notices()
    orchestrators: list[Orchestrator] = []
    async with asyncio.TaskGroup() as background:
        shardings = param_shardings(parts.model.axes(), own.meshes.sampler)
        sampler = LocalSampler(
            parts, started.sampler, own.sampler, shardings, own.sampling, background
        )
        trainer = Trainer(
            parts,
            Updates(parts, own.meshes.trainer, started.trainer, own.trainer),
            own.record,
            notices,
            own.trainer,
            stop,
            background,
            found,
            deliver=sampler.deliver,
            oldest_in_flight=lambda: [v for o in orchestrators for v in o.oldest_in_flight()],
        )

        def watch(orchestrator: Orchestrator) -> None:
            orchestrators.append(orchestrator)
            gauges = {
                names.QUEUE_DEPTH: lambda: len(trainer.queue),
                names.IN_FLIGHT: lambda: orchestrator.state.running,
                names.STALE_CACHE_TOKENS: lambda: sampler.engine.stale_cache_tokens,
            }
            busy = {"trainer": own.trainer, "sampler": own.sampler}
            own.record.watch(gauges, busy, lambda: sampler.engine.sampled_tokens)

        orchestration = background.create_task(
            orchestrate(
                parts,
                sampler,
                trainer.queue,
                aiter(notices),
                sampler.applied,
                own.rollouts,
                found.rollouts if found else None,
                watch,
            )
        )
        finished = await trainer.run(started.weights)
        if finished:
            finished = await stop.waits_for(_joined(orchestration))
        orchestration.cancel()
        sampler.end()
    return finished


async def _joined(task: asyncio.Task[None]) -> None:
    """A task of a group must not be cancelled by who waits for it."""
    await asyncio.wait({task})
