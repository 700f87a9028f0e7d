"""[H] The trainer program: batches from the queue, updates, a push every K updates.

It knows neither samplers nor the journal; what others must hear is in `Hooks`. It crashes on a
fault of its own: a step that is not finite is not applied, its batch is saved, and the error names
the tensor and the trajectory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rl_jax import rng
from rl_jax.advantages import Advantage
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.losses.types import Reduction
from rl_jax.metrics import names
from rl_jax.queues.base import Queue
from rl_jax.staleness import Admit
from rl_jax.trainer.batches import Batch, Shape, build_batch, locate
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import StepReport, TrainStep
from rl_jax.trajectories.types import Group, Trajectory

Audit = Callable[[Tree, Batch, np.int32], tuple[jax.Array, jax.Array]]
"""(params, one microbatch, lag) -> (max |behavior - logprob|, tokens) over tokens of that lag."""


class Programs(NamedTuple):
    """Compiled for the trainer's mesh."""

    step: TrainStep
    reset: Callable[[TrainState], TrainState]
    """Optimizer state as it is after a push."""
    audit: Audit


class Schedule(NamedTuple):
    updates: int
    groups: int
    """Per update."""
    push_every: int
    queue_timeout_s: float
    step_timeout_s: float


class Hooks(NamedTuple):
    """What the run around the trainer does."""

    published_version: Callable[[], int]
    on_batch: Callable[[int, Sequence[Group]], Awaitable[None]]
    """(update, groups in the order of the batch); returns when that is durable."""
    on_update: Callable[[int, Mapping[str, float]], Awaitable[None]]
    push: Callable[[Tree, int], Awaitable[Tree]]
    """(params, update) -> the published copy, once published and on its way to the samplers."""
    settled: Callable[[int], None]
    """So many groups are done with."""


class NotFinite(RuntimeError):
    """A loss or gradient was not finite; the parameters are those before the step."""


class Auditor:
    """Holds published weights until tokens they sampled are at hand, then compares once a version.

    `dlogp_fresh`: tokens of one version against that very version in the trainer, so that what is
    left is the difference of the two programs.
    """

    KEPT = 2

    def __init__(self, params: Tree, version: int) -> None:
        self._held = {version: params}

    def hold(self, params: Tree, version: int) -> None:
        """Newly published weights; only the newest few wait for their tokens."""
        self._held[version] = params
        for old in sorted(self._held)[: -self.KEPT]:
            del self._held[old]

    def due(self, batch: Batch, published: int) -> tuple[Tree, Batch, np.int32] | None:
        """The newest held version with tokens in the batch: its weights, the microbatch with most
        of them, their lag."""
        for version in sorted(self._held, reverse=True):
            own = batch.mask & (batch.lag == published - version)
            counts = own.sum(axis=(1, 2))
            if counts.any():
                index = int(counts.argmax())
                part = Batch(*(leaf[index] for leaf in batch[:-1]), count=batch.count)
                return self._held.pop(version), part, np.int32(published - version)
        return None


async def train(
    state: TrainState,
    programs: Programs,
    schedule: Schedule,
    hooks: Hooks,
    queue: Queue,
    admit: Admit,
    dispatcher: Dispatcher,
    *,
    advantage: Advantage,
    reduction: Reduction,
    shape: Shape,
    auditor: Auditor,
    shuffle_seed: int | None = None,
    save_bad_batch: Path,
) -> TrainState:
    """Runs `schedule.updates` updates. `shuffle_seed` permutes each batch's rewards: a control.

    Raises NotFinite, TimeoutError where the queue or a step exceeds its deadline, and what the
    queue raises where another program failed.
    """
    for update in range(1, schedule.updates + 1):
        groups = await queue.get(
            schedule.groups, admit, step=update, timeout=schedule.queue_timeout_s
        )
        groups.sort(key=lambda group: (group.task, group.prompt))
        await hooks.on_batch(update, groups)
        published = hooks.published_version()
        if shuffle_seed is not None:
            groups = shuffle_rewards(groups, shuffle_seed, update)
        members = [member for group in groups for member in group.members]
        advantages = [a for group in groups for a in advantage(group, None)]
        batch, padding = await asyncio.to_thread(
            build_batch, members, advantages, reduction, published, shape
        )
        async with asyncio.timeout(schedule.step_timeout_s):
            audited = auditor.due(batch, published)
            dlogp = await dispatcher.run(_audit, programs, audited) if audited else {}
            state, report = await dispatcher.run(_step, programs, state, batch)
        _check_finite(report, batch, members, save_bad_batch)
        metrics = _metrics(report, batch, members, padding) | dlogp
        if update % schedule.push_every == 0 or update == schedule.updates:
            state = await dispatcher.run(programs.reset, state)
            auditor.hold(await hooks.push(state.params["policy"], update), published + 1)
            queue.ack(update)
        await hooks.on_update(update, metrics)
        hooks.settled(len(groups))
    return state


def shuffle_rewards(groups: Sequence[Group], seed: int, update: int) -> list[Group]:
    """The groups, rewards permuted among the batch's valid rollouts; copies follow originals."""
    keys = [m.key for g in groups for m in g.members if m.copy_of is None]
    rewards = {m.key: m.reward for g in groups for m in g.members}
    order = rng.host(seed, rng.Purpose.SHUFFLE, update).permutation(len(keys))
    moved = {key: rewards[keys[other]] for key, other in zip(keys, order, strict=True)}
    return [
        replace(g, members=tuple(replace(m, reward=moved[m.key]) for m in g.members))
        for g in groups
    ]


def _step(programs: Programs, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
    state, report = programs.step(state, batch)
    return state, jax.device_get(report)


def _audit(programs: Programs, due: tuple[Tree, Batch, np.int32]) -> dict[str, float]:
    worst, count = jax.device_get(programs.audit(*due))
    return {names.DLOGP_FRESH: float(worst), names.FRESH_TOKENS: float(count)}


def _metrics(
    report: StepReport, batch: Batch, members: Sequence[Trajectory], padding: float
) -> dict[str, float]:
    originals = [m for m in members if m.copy_of is None]
    lag = batch.lag[batch.mask]
    computed = {
        name: float(mean.total / mean.count) if mean.count else 0.0
        for name, mean in report.metrics.items()
    }
    return computed | {
        names.LOSS: float(report.loss),
        names.GRAD_NORM: float(report.grad_norm),
        names.REWARD: float(np.mean([m.reward for m in originals if m.reward is not None])),
        names.LAG_MEAN: float(lag.mean()) if lag.size else 0.0,
        names.LAG_MAX: float(lag.max(initial=0)),
        names.TRAINED_TOKENS: float(sum(int(m.loss_mask.sum()) for m in originals)),
        names.TRAINED_TRAJECTORIES: float(len(originals)),
        names.TRAINED_LENGTH: float(np.mean([len(m.tokens) for m in originals])),
        names.PADDING_SHARE: padding,
    }


def _check_finite(
    report: StepReport, batch: Batch, members: Sequence[Trajectory], save_to: Path
) -> None:
    bad = [name for name, finite in report.finite.items() if not finite]
    if not bad and np.isfinite(report.loss):
        return
    np.savez(save_to, **batch._asdict())
    where = np.argwhere(report.bad_column >= 0)
    culprit = "no single trajectory"
    if len(where):
        microbatch, row = (int(i) for i in where[0])
        number = locate(batch, microbatch, row, int(report.bad_column[microbatch, row]))
        culprit = f"trajectory {members[number].key}"
    raise NotFinite(
        f"update not applied: {f'the gradient of {bad[0]}' if bad else 'the loss'} is not finite, "
        f"{culprit}; the batch is in {save_to}"
    )
