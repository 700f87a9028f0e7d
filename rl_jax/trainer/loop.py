"""[H] The trainer program: batches from the queue, updates, a push every K updates.

An update is what the advantage needs of critic and policy, advantages on the host, the critic's
steps, the policy's step.

It knows neither samplers nor the journal; what others must hear is in `Hooks`. It crashes on a
fault of its own: a step that is not finite is not applied, its batch is saved, and the error names
the tensor and the trajectory.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from rl_jax import rng
from rl_jax.advantages import Advantage, Estimates
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.losses.ratios import ess_share
from rl_jax.losses.types import Reduction
from rl_jax.metrics import names
from rl_jax.trainer.batches import (
    Batch,
    Built,
    Shape,
    advantaged,
    build_batch,
    cut,
    host_microbatch,
    locate,
    per_group,
    reduce,
    spread,
)
from rl_jax.trainer.critic import Estimate, explained_variance
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import StepReport, TrainStep
from rl_jax.trajectories.lineage import pure
from rl_jax.trajectories.types import Group, Trajectory

Audit = Callable[[Tree, Batch, np.int32], tuple[jax.Array, jax.Array]]
"""(params, one microbatch, lag) -> (max |behavior - logprob|, tokens) over tokens of that lag."""


class Critic(NamedTuple):
    """The critic's part of an update: ahead of the policy's."""

    step: TrainStep
    updates: int
    """On every batch."""
    reduction: Reduction


class Programs(NamedTuple):
    """Compiled for the trainer's mesh."""

    step: TrainStep
    after_push: Callable[[TrainState], TrainState]
    """The state as it is after a push."""
    audit: Audit
    critic: Critic | None = None
    estimate: Estimate | None = None
    """What the advantage needs beside rewards."""
    choices: tuple[int, int] | None = None
    """(layers, of a token): what batches have room for of the experts that the sampler chose."""


class Schedule(NamedTuple):
    updates: int
    push_every: int
    step_timeout_s: float


class Taken(NamedTuple):
    """What an update trains on."""

    groups: list[Group]
    """In the order of the batch."""
    published_version: int
    """Newest when the batch was taken: every lag counts from it."""


Take = Callable[[int], Awaitable[Taken | None]]
"""(update) -> its batch, durably on record; None: the run shall stop before this update."""


class Pushed(NamedTuple):
    """The publisher's copy, which nobody donates; the trainer does not wait for its publication."""

    version: int
    params: Tree


class Hooks(NamedTuple):
    """What the run around the trainer does."""

    take: Take
    on_update: Callable[[int, Mapping[str, float]], Awaitable[None]]
    push: Callable[[Tree, int], Awaitable[Pushed]]
    """(params, update) -> the copy; returns when it is made."""
    settled: Callable[[int, Sequence[Group]], None]
    """(update, groups): trained on; their samplers may go on."""
    checkpoint: Callable[[TrainState, int], Awaitable[None]]
    """(state, update), after every push; returns when the state may be donated."""


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

    def due(
        self, batch: Batch, published: int, members: Sequence[Trajectory]
    ) -> tuple[Tree, Batch, np.int32] | None:
        """The newest held version with tokens in the batch: its weights, the microbatch with most
        of them, their lag. Tokens sampled from caches of older versions too are masked out."""
        for version in sorted(self._held, reverse=True):
            own = batch.mask & (batch.lag == published - version)
            counts = own.sum(axis=(1, 2))
            if not counts.any():
                continue
            index = int(counts.argmax())
            part = host_microbatch(batch, index)
            fresh = own[index] & _of_one_version(part, members)
            if fresh.any():
                weights = self._held.pop(version)
                return weights, part._replace(mask=fresh), np.int32(published - version)
        return None


def _of_one_version(part: Batch, members: Sequence[Trajectory]) -> np.ndarray:
    """bool[R, L]: tokens of a microbatch whose whole cache was of their own version."""
    fresh = np.zeros(part.mask.shape, np.bool_)
    for number in np.unique(part.segment_ids[part.mask]):
        where = part.segment_ids == number
        fresh[where] = pure(members[number])[part.positions[where]]
    return fresh


async def train(
    state: TrainState,
    programs: Programs,
    schedule: Schedule,
    hooks: Hooks,
    dispatcher: Dispatcher,
    *,
    done: int = 0,
    advantage: Advantage,
    reduction: Reduction,
    shape: Shape,
    auditor: Auditor | None,
    shuffle_seed: int | None = None,
    save_bad_batch: Path | None,
) -> tuple[TrainState, int]:
    """Runs the updates from `done` + 1 to `schedule.updates`; returns the state and the last one.

    `shuffle_seed` permutes each batch's rewards: a control. A batch that is not finite goes to
    `save_bad_batch`, where that is not None. Raises NotFinite, TimeoutError where a
    step exceeds its deadline, and what `hooks.take` raises where another program failed.
    """
    for update in range(done + 1, schedule.updates + 1):
        began = time.perf_counter()
        if (taken := await hooks.take(update)) is None:
            return state, update - 1
        waited = time.perf_counter() - began
        groups, published = taken
        rewarded = groups if shuffle_seed is None else shuffle_rewards(groups, shuffle_seed, update)
        members = [member for group in rewarded for member in group.members]
        how = reduction, published, shape, programs.choices
        built = await asyncio.to_thread(build_batch, members, *how)
        ready = time.perf_counter()
        try:
            async with asyncio.timeout(schedule.step_timeout_s):
                estimates = await _estimates(programs, dispatcher, state, built, rewarded)
                work = partial(advantaged, built, advantage, rewarded, estimates)
                batch = await asyncio.to_thread(work)
                audited = auditor.due(batch, published, members) if auditor else None
                more = await dispatcher.run(_audit, programs, audited) if audited else {}
                if programs.critic is not None:
                    weigh = partial(_of_critic, batch, built, programs.critic, members)
                    own = await asyncio.to_thread(weigh)
                    checks = partial(
                        _check_finite, batch=own, members=members, save_to=save_bad_batch
                    )
                    state, told = await _train_critic(
                        state, programs.critic, dispatcher, own, checks
                    )
                    more |= told
                state, report = await dispatcher.run(_step, programs.step, state, batch)
        except TimeoutError:
            seconds = schedule.step_timeout_s
            raise TimeoutError(f"update {update} has not ended in {seconds:g} s") from None
        stepped = time.perf_counter()
        _check_finite(report, batch, members, save_bad_batch)
        metrics = _metrics(report, batch, members, built.padding) | more
        pushes = update % schedule.push_every == 0 or update == schedule.updates
        if pushes:
            state = await dispatcher.run(programs.after_push, state)
            pushed = await hooks.push(state.params["policy"], update)
            if auditor:
                auditor.hold(pushed.params, pushed.version)
        metrics |= {
            names.WAIT_SECONDS: waited,
            names.STEP_SECONDS: stepped - ready,
            names.PUSH_SECONDS: time.perf_counter() - stepped if pushes else 0.0,
        }
        await hooks.on_update(update, metrics)
        hooks.settled(update, groups)
        if pushes:
            await hooks.checkpoint(state, update)
    return state, max(done, schedule.updates)


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


async def _estimates(
    programs: Programs,
    dispatcher: Dispatcher,
    state: TrainState,
    built: Built,
    groups: Sequence[Group],
) -> list[Estimates]:
    """One for each group; nothing is computed where the advantage asks for nothing."""
    if programs.estimate is None:
        return [Estimates() for _ in groups]
    found = await dispatcher.run(_estimate, programs.estimate, state, built.batch)
    members = [member for group in groups for member in group.members]
    cuts = {name: cut(array, built.places, members) for name, array in found.items()}
    return per_group(groups, cuts)


async def _train_critic(
    state: TrainState,
    critic: Critic,
    dispatcher: Dispatcher,
    batch: Batch,
    check: Callable[[StepReport], None],
) -> tuple[TrainState, dict[str, float]]:
    """The state after the critic's updates, and what the first said: of the critic that the
    advantages are from."""
    told: dict[str, float] = {}
    for _ in range(critic.updates):
        state, report = await dispatcher.run(_step, critic.step, state, batch, label="critic step")
        check(report)
        told = told or _critic_metrics(report)
    return state, told


def _of_critic(batch: Batch, built: Built, critic: Critic, members: Sequence[Trajectory]) -> Batch:
    """The batch under the weights of the critic's reduction."""
    weights = reduce(critic.reduction, members)
    return batch._replace(weights=spread(batch, built.places, weights))


def _estimate(run: Estimate, state: TrainState, batch: Batch) -> dict[str, np.ndarray]:
    return jax.device_get(run(state.params, batch))


def _step(step: TrainStep, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
    state, report = step(state, batch)
    return state, jax.device_get(report)


def _audit(programs: Programs, due: tuple[Tree, Batch, np.int32]) -> dict[str, float]:
    worst, count = jax.device_get(programs.audit(*due))
    return {names.DLOGP_FRESH: float(worst), names.FRESH_TOKENS: float(count)}


def _critic_metrics(report: StepReport) -> dict[str, float]:
    return {
        names.CRITIC_LOSS: float(report.loss),
        names.CRITIC_GRAD_NORM: float(report.grad_norm),
        names.CRITIC_EXPLAINED_VARIANCE: explained_variance(_computed(report)),
    }


def _computed(report: StepReport) -> dict[str, float]:
    return {
        name: float(mean.total / mean.count) if mean.count else 0.0
        for name, mean in report.metrics.items()
    }


def _metrics(
    report: StepReport, batch: Batch, members: Sequence[Trajectory], padding: float
) -> dict[str, float]:
    originals = [m for m in members if m.copy_of is None]
    lag = batch.lag[batch.mask]
    computed = _computed(report)
    if names.ESS_WEIGHT in computed:
        moments = computed[names.ESS_WEIGHT], computed[names.ESS_WEIGHT_SQUARED]
        computed[names.ESS_SHARE] = float(ess_share(*moments))
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
    report: StepReport, batch: Batch, members: Sequence[Trajectory], save_to: Path | None
) -> None:
    bad = [name for name, finite in report.finite.items() if not finite]
    if not bad and np.isfinite(report.loss):
        return
    if save_to is not None:
        held = {name: leaf for name, leaf in batch._asdict().items() if leaf is not None}
        np.savez(save_to, **held)
    where = np.argwhere(report.bad_column >= 0)
    culprit = "no single trajectory"
    if len(where):
        microbatch, row = (int(i) for i in where[0])
        number = locate(batch, microbatch, row, int(report.bad_column[microbatch, row]))
        culprit = f"trajectory {members[number].key}"
    raise NotFinite(
        f"update not applied: {f'the gradient of {bad[0]}' if bad else 'the loss'} is not finite, "
        f"{culprit}; the batch is in {save_to or 'what process 0 wrote'}"
    )
