"""[H] The orchestrator's part of a run: evaluation, rollouts until the trainer ends, evaluation."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable

from launch import build
from launch.notices import Dropped, Ended, Notice, Published, Settled
from launch.programs.base import Parts, rollout_limits
from launch.record import OrchestratorRecord
from launch.resume import Rollouts
from rl_jax.config.run import RunConfig
from rl_jax.gateway.protocol import SamplerClient
from rl_jax.orchestrator.loop import Orchestrator, evaluate, solve_rate
from rl_jax.queues.base import SharedQueue
from rl_jax.tasks.base import Prompt
from rl_jax.trajectories.types import Trajectory

Applied = Callable[[int], Awaitable[None]]
"""Returns when the samplers sample with this version, or a newer one."""


async def orchestrate(
    parts: Parts,
    sampler: SamplerClient,
    queue: SharedQueue,
    notices: AsyncIterator[Notice],
    applied: Applied,
    record: OrchestratorRecord,
    again: Rollouts | None,
    on_orchestrator: Callable[[Orchestrator], None] = lambda orchestrator: None,
) -> None:
    """Until the trainer has ended; the evaluations that are not on record yet are made."""
    version = await _first_version(notices)
    evaluated = again.evaluated if again else frozenset()
    if "before" not in evaluated:
        await applied(version)
        await _evaluate(parts, sampler, record, "before", version)
    orchestrator = build_orchestrator(parts, sampler, queue, record, again)
    orchestrator.published(version)
    on_orchestrator(orchestrator)
    try:
        async with asyncio.TaskGroup() as running:
            rollouts = running.create_task(orchestrator.run())
            ended = await _pass_on(parts.config, notices, orchestrator, applied)
            rollouts.cancel()
    finally:
        await record.on_left(orchestrator.left())
    if ended.finished:
        await applied(ended.version)
        await _evaluate(parts, sampler, record, "after", ended.version)


def build_orchestrator(
    parts: Parts,
    sampler: SamplerClient,
    queue: SharedQueue,
    record: OrchestratorRecord,
    again: Rollouts | None,
) -> Orchestrator:
    """The orchestrator that the configuration describes, where the run goes on."""
    config = parts.config
    return Orchestrator(
        parts.family.train,
        parts.family.order(config.seed),
        sampler,
        parts.renderer,
        queue,
        build.build_limits(config),
        rollout_limits(config, training=True),
        put_timeout=config.deadlines.put_s,
        on_started=record.on_started,
        on_rollout=record.on_rollout,
        on_discard=record.on_discard,
        on_lost=record.on_lost,
        resume=again.resume if again else None,
    )


async def _first_version(notices: AsyncIterator[Notice]) -> int:
    """Sampling starts with a version; the trainer tells of it before anything else."""
    first = await anext(notices)
    assert isinstance(first, Published), "the trainer publishes before it takes anything"
    return first.version


async def _pass_on(
    config: RunConfig, notices: AsyncIterator[Notice], orchestrator: Orchestrator, applied: Applied
) -> Ended:
    """Where the version that a group starts under is counted on, none starts before it samples."""
    exact = config.rollout.ahead == 0 or config.staleness.when_stale == "pace"
    async for notice in notices:
        match notice:
            case Published(version):
                if exact:
                    await applied(version)
                orchestrator.published(version)
            case Settled(prompts):
                orchestrator.settled(prompts)
            case Dropped(prompt):
                orchestrator.dropped(prompt)
            case Ended() as ended:
                return ended
    raise AssertionError("notices end with Ended")


async def _evaluate(
    parts: Parts, sampler: SamplerClient, record: OrchestratorRecord, when: str, version: int
) -> None:
    config, reporter = parts.config, parts.reporter
    questions = config.evaluation.questions
    name = f"evaluation {when} RL"
    reporter.phase(name, questions)
    done: list[Trajectory] = []

    def told(trajectory: Trajectory) -> None:
        done.append(trajectory)
        reporter.progress(len(done), solved=solve_rate(done))

    began = parts.time.now()
    results = await evaluate(
        parts.family.heldout,
        range(questions),
        sampler,
        parts.renderer,
        rollout_limits(config, training=False),
        at_once=config.rollout.in_flight,
        on_done=told,
    )
    record.trace.span("evaluation", when, began, parts.time.now())
    rates = _rates(parts, results)
    await record.on_evaluated(when, version, done, rates)
    reporter.note(f"{name}: {rates['all']:.3f} of {questions} held-out questions")


def _rates(parts: Parts, results: list[tuple[Prompt, Trajectory]]) -> dict[str, float]:
    """Solve rates by label, "all" for all."""
    by_label: dict[str, list[Trajectory]] = defaultdict(list)
    for prompt, trajectory in results:
        by_label[parts.family.heldout.label(prompt)].append(trajectory)
    rates = {label: solve_rate(done) for label, done in sorted(by_label.items())}
    return {"all": solve_rate([t for _, t in results])} | rates
