"""[H] A whole run in one process: trainer and samplers on their own meshes, one event loop.

Warm start, evaluation, the asynchronous loop, evaluation, summary.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from launch import build, picture
from launch.failure import first_cause
from launch.push import Pusher
from launch.record import Record, within
from launch.summary import Summary, busy_seconds, overlap_seconds
from launch.terminal import Reporter
from launch.warm_start import first_params, warm_start
from rl_jax.arrays import Tree
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.renderer import Renderer
from rl_jax.gateway.renderer_files import load_renderer
from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.model import Model
from rl_jax.orchestrator.loop import Orchestrator, evaluate, solve_rate
from rl_jax.orchestrator.rollout import RolloutLimits
from rl_jax.orchestrator.state import Limits
from rl_jax.queues.memory import MemoryQueue
from rl_jax.replay import events, journal
from rl_jax.sampler.engine import Engine
from rl_jax.sampler.programs import Programs as SamplerPrograms
from rl_jax.sharding import param_shardings
from rl_jax.snapshots.publisher import Publisher
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.staleness import Admit, drop_stale, wait_for_stragglers
from rl_jax.tasks.base import Prompt, TaskFamily
from rl_jax.trainer.loop import Auditor, Hooks, Programs, Schedule, train
from rl_jax.trainer.state import TrainState
from rl_jax.trajectories.types import Trajectory

Results = list[tuple[Prompt, Trajectory]]


class _Compiled(NamedTuple):
    step: build.StepProgram
    trainer: Programs
    sampler: SamplerPrograms


class _Parts(NamedTuple):
    """What is there before anything runs."""

    config: RunConfig
    run_dir: Path
    reporter: Reporter
    family: TaskFamily
    renderer: Renderer
    model: Model
    meshes: build.Meshes
    trainer: Dispatcher
    sampler: Dispatcher


def run_local(config: RunConfig, run_dir: Path, reporter: Reporter) -> Summary:
    """Runs `config` in this process and leaves its record in `run_dir`, which exists.

    Raises UserError before anything is written, and whatever stopped a program after that: its own
    exception, not the group of all that followed.
    """
    began = time.perf_counter()
    family = build.build_task(config)
    check_questions(config, family)
    renderer = _renderer(family)
    model = build.build_policy(config, renderer.vocab_size)
    meshes = build.build_meshes(config)
    params = first_params(config, model, meshes.trainer)
    trainer, sampler = Dispatcher("trainer"), Dispatcher("sampler")
    parts = _Parts(config, run_dir, reporter, family, renderer, model, meshes, trainer, sampler)
    try:
        return asyncio.run(_run(parts, params, began))
    except BaseExceptionGroup as group:
        stopped = first_cause(group)
    finally:
        trainer.close()
        sampler.close()
    raise stopped


def check_questions(config: RunConfig, family: TaskFamily) -> None:
    """Raises UserError where more held-out questions are wanted than the task has."""
    wanted, there = config.evaluation.questions, len(family.heldout)
    if wanted > there:
        raise UserError(
            f"evaluation.questions = {wanted}: needs at most {there}, the held-out questions of "
            f"task.name = {json.dumps(config.task.name)}"
        )


def _renderer(family: TaskFamily) -> Renderer:
    try:
        return load_renderer(family.tokenizer_directory)
    except ValueError as error:
        raise UserError(f"tokenizer of the task: {error}") from error


async def _run(parts: _Parts, params: Tree, began: float) -> Summary:
    config = parts.config
    async with asyncio.TaskGroup() as starting:
        compiling = starting.create_task(asyncio.to_thread(_compile, parts))
        params = await warm_start(
            config, parts.model, params, parts.family, parts.renderer, parts.trainer, parts.reporter
        )
        parts.reporter.phase("compiling")
    compiled = compiling.result()
    log = journal.create(parts.run_dir / "journal")
    record = Record(parts.run_dir, log, parts.reporter, parts.trainer, parts.sampler, began)
    try:
        fingerprint = f"jax {jax.__version__}, {jax.devices()[0].device_kind}"
        await record.event(events.RunStarted(config.seed, config.model_dump_json(), fingerprint))
        summary = await _learn(parts, record, compiled, params)
    finally:
        record.close()
        await log.close()
    _leave(parts, record, summary)
    return summary


def _compile(parts: _Parts) -> _Compiled:
    config, model, meshes = parts.config, parts.model, parts.meshes
    shape = build.rl_shape(config)
    sampler = build.compile_sampler(config, model, meshes.sampler)
    loss, optimizer = build.build_loss(config), build.build_optimizer(config)
    step = build.compile_step(model, loss, optimizer, meshes.trainer, shape)
    audit = build.compile_audit(model, meshes.trainer, shape)
    return _Compiled(step, Programs(step.step, step.reset, audit), sampler)


async def _learn(parts: _Parts, record: Record, compiled: _Compiled, params: Tree) -> Summary:
    config = parts.config
    store = SnapshotStore(parts.run_dir / "snapshots")
    publisher = Publisher(store, on_digest=record.on_digest)
    shardings = param_shardings(parts.model.axes(), parts.meshes.sampler)
    pusher = Pusher(publisher, record, parts.trainer, parts.sampler, shardings)
    initial, weights = await pusher.publish(params, 0)
    on_push = config.sampler.on_push
    engine = Engine(weights, compiled.sampler, parts.sampler, on_push=on_push)
    async with asyncio.TaskGroup() as background:
        sampling = background.create_task(engine.run())
        before = await _evaluate(parts, engine, "evaluation before RL")
        begin = time.perf_counter()
        state = compiled.step.init(params)
        pusher.attach(engine, background)
        state = await _loop(parts, record, compiled.trainer, state, engine, pusher, initial)
        end = time.perf_counter()
        await pusher.applied()
        after = await _evaluate(parts, engine, "evaluation after RL")
        sampling.cancel()
    return _summary(parts, record, before, after, int(state.step), begin, end)


async def _loop(
    parts: _Parts,
    record: Record,
    programs: Programs,
    state: TrainState,
    engine: Engine,
    pusher: Pusher,
    initial: Tree,
) -> TrainState:
    config = parts.config
    own = config.trainer
    limits = Limits(own.group_size, own.groups, config.rollout.in_flight, config.rollout.ahead)
    queue = MemoryQueue(
        max(limits.outstanding, own.groups),
        lambda: record.version,
        record.on_put,
        lambda group, reason: (record.on_drop(group, reason), orchestrator.settled(1)),
    )
    orchestrator = Orchestrator(
        parts.family.train,
        parts.family.order(config.seed),
        engine,
        parts.renderer,
        queue,
        limits,
        rollout_limits(config, training=True),
        put_timeout=config.deadlines.put_s,
        on_rollout=record.on_rollout,
        on_discard=record.on_discard,
    )
    parts.reporter.phase("asynchronous RL", own.updates)
    record.watch(
        {
            names.QUEUE_DEPTH: lambda: len(queue),
            names.IN_FLIGHT: lambda: orchestrator.state.running,
        },
        lambda: engine.sampled_tokens,
    )
    async with asyncio.TaskGroup() as programs_running:
        rollouts = programs_running.create_task(orchestrator.run())
        state = await train(
            state,
            programs,
            Schedule(
                own.updates,
                own.groups,
                own.push_every,
                config.deadlines.queue_get_s,
                config.deadlines.step_s,
            ),
            Hooks(
                lambda: record.version,
                record.on_batch,
                record.on_update,
                pusher.push,
                orchestrator.settled,
            ),
            queue,
            build_admit(config, orchestrator),
            parts.trainer,
            advantage=build.build_advantage(config),
            reduction=build.build_loss(config).reduction,
            shape=build.rl_shape(config),
            auditor=Auditor(initial, 0),
            shuffle_seed=config.seed if config.control.rewards == "shuffled" else None,
            save_bad_batch=parts.run_dir / "not_finite_batch.npz",
        )
        rollouts.cancel()
    return state


def build_admit(config: RunConfig, orchestrator: Orchestrator) -> Admit:
    """The staleness policy that the configuration names."""
    own = config.staleness
    if own.when_stale == "drop":
        return drop_stale(own.tau)
    return wait_for_stragglers(own.tau, orchestrator.oldest_in_flight, own.wait_deadline_s)


def rollout_limits(config: RunConfig, *, training: bool) -> RolloutLimits:
    """Evaluation is greedy; all other limits are those of training."""
    own = config.rollout
    return RolloutLimits(
        temperature=own.temperature if training else 0.0,
        max_new_tokens=own.max_new_tokens,
        max_turns=own.max_turns,
        tool_deadline_s=own.tool_deadline_s,
        request_deadline_s=config.deadlines.step_s,
        training=training,
    )


async def _evaluate(parts: _Parts, engine: Engine, name: str) -> Results:
    config, reporter = parts.config, parts.reporter
    questions = config.evaluation.questions
    reporter.phase(name, questions)
    done: list[Trajectory] = []

    def told(trajectory: Trajectory) -> None:
        done.append(trajectory)
        reporter.progress(len(done), solved=solve_rate(done))

    results = await evaluate(
        parts.family.heldout,
        range(questions),
        engine,
        parts.renderer,
        rollout_limits(config, training=False),
        at_once=config.rollout.in_flight,
        on_done=told,
    )
    reporter.note(
        f"{name}: {solve_rate([t for _, t in results]):.3f} of {questions} held-out questions"
    )
    return results


def _by_label(parts: _Parts, results: Results) -> dict[str, float]:
    by_label: dict[str, list[Trajectory]] = defaultdict(list)
    for prompt, trajectory in results:
        by_label[parts.family.heldout.label(prompt)].append(trajectory)
    return {label: solve_rate(done) for label, done in sorted(by_label.items())}


def _summary(
    parts: _Parts,
    record: Record,
    before: Results,
    after: Results,
    steps: int,
    begin: float,
    end: float,
) -> Summary:
    trainer = within(parts.trainer.busy, begin, end)
    sampler = within(parts.sampler.busy, begin, end)
    return Summary(
        seed=parts.config.seed,
        solve_rate_before=solve_rate([t for _, t in before]),
        solve_rate_after=solve_rate([t for _, t in after]),
        solve_rate_by_hops_before=_by_label(parts, before),
        solve_rate_by_hops_after=_by_label(parts, after),
        steps=steps,
        versions_published=record.version,
        max_lag=record.max_lag,
        trained_tokens=record.counts["tokens"],
        dropped=record.counts["dropped"],
        trainer_busy_seconds=busy_seconds(trainer),
        sampler_busy_seconds=busy_seconds(sampler),
        overlap_seconds=overlap_seconds(trainer, sampler),
        max_dlogp_fresh=record.max_dlogp_fresh,
        wall_seconds=time.perf_counter() - record.began,
    )


def _leave(parts: _Parts, record: Record, summary: Summary) -> None:
    """Summary and picture."""
    (parts.run_dir / "summary.json").write_text(summary.to_json())
    if not picture.can_draw():
        return

    def shifted(dispatcher: Dispatcher) -> Sequence[tuple[float, float]]:
        return [(a - record.began, b - record.began) for a, b in dispatcher.busy]

    picture.draw(
        parts.run_dir / "picture.png",
        read(parts.run_dir / "metrics.jsonl"),
        summary,
        parts.config.staleness.tau,
        {"trainer": shifted(parts.trainer), "sampler": shifted(parts.sampler)},
    )
