"""Groups with everything that may happen to a rollout, and their advantages read off the tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from rl_jax.advantages import (
    Advantage,
    Estimates,
    batch_standardised,
    estimate,
    gae,
    group_mean,
    leave_one_out,
    length_adaptive_gae,
    max_rl,
    reinforce_plus_plus,
    single,
    standardised,
    vtrace,
)
from rl_jax.trajectories.types import NOT_SAMPLED, Group, Trajectory, copy_of
from tests.trajectories.build import trajectory

EVERY = {
    "group_mean": group_mean(),
    "standardised": standardised(),
    "leave_one_out": leave_one_out(),
    "max_rl": max_rl(),
    "single": single(0.25),
    "batch_standardised": batch_standardised(),
    "batch_standardised(gae)": batch_standardised(gae(0.9, 0.8)),
    "reinforce_plus_plus": reinforce_plus_plus(0.9),
    "gae": gae(0.9, 0.8, 0.95),
    "length_adaptive_gae": length_adaptive_gae(),
    "vtrace": vtrace(0.9, 1.5, 1.2, 0.8),
}
GROUP_RELATIVE = ("group_mean", "standardised", "leave_one_out", "max_rl")


class Known(NamedTuple):
    """A trajectory with what the trainer estimates of it."""

    trajectory: Trajectory
    values: np.ndarray
    log_ratios: np.ndarray


def known(member: Trajectory, seed: int) -> Known:
    values, log_ratios = np.random.default_rng(abs(seed)).normal(size=(2, len(member.tokens)))
    return Known(member, np.float32(values), np.float32(log_ratios))


def copied(own: Known) -> Known:
    return own._replace(trajectory=copy_of(own.trajectory))


def computed(
    advantage: Advantage, groups: Sequence[Sequence[Known]]
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """(advantages, returns) of each member of each group."""
    made = [
        Group("lookup", own[0].trajectory.key.prompt, tuple(k.trajectory for k in own))
        for own in groups
    ]
    estimates = [
        Estimates(tuple(k.values for k in own), tuple(k.log_ratios for k in own)) for own in groups
    ]
    advantages, returns = estimate(advantage, made, estimates)
    return [list(zip(a, r, strict=True)) for a, r in zip(advantages, returns, strict=True)]


def last(advantage: Advantage, *groups: Group) -> list[list[float]]:
    """Each member's advantage, read from its last token; without estimates."""
    advantages, _ = estimate(advantage, groups, [Estimates()] * len(groups))
    return [[float(a[-1]) for a in arrays] for arrays in advantages]


def cleared(member: Trajectory) -> Trajectory:
    """The same tokens, none of them sampled."""
    return replace(
        member,
        loss_mask=np.zeros_like(member.loss_mask),
        versions=np.full_like(member.versions, NOT_SAMPLED),
    )


REWARDS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 8, width=16))
STREAMS = st.lists(st.sampled_from([NOT_SAMPLED, 0, 1]), max_size=5).map(tuple)


ROLLOUT = st.tuples(REWARDS | st.none(), st.lists(STREAMS, min_size=1, max_size=3))
"""A reward, None where it failed, and the versions of each trajectory's tokens."""
BATCHES = st.lists(st.lists(ROLLOUT, min_size=1, max_size=4), min_size=1, max_size=3)
"""The rollouts of each prompt."""


def members(batch: Sequence[Sequence[tuple]]) -> list[list[Known]]:
    """The trajectories of each group."""
    return [
        [
            known(trajectory(sample, reward, stream, prompt=prompt), hash((prompt, sample, number)))
            for sample, (reward, streams) in enumerate(group)
            for number, stream in enumerate(streams)
        ]
        for prompt, group in enumerate(batch)
    ]
