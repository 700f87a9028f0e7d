"""[N] Advantages of a group: one number per rollout, spread over its sampled tokens.

The baseline is over rollouts, each once: a padding copy takes its original's advantage and adds
nothing, a failed rollout takes no part. Weighting and clipping belong to the loss.
"""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

from rl_jax.trajectories.types import Group

Advantages = tuple[Float32[np.ndarray, " T"], ...]
"""One array per member, aligned to its tokens, 0 where no token was sampled."""

Values = tuple[Float32[np.ndarray, " T"], ...]
"""A critic's value per token and member."""

Advantage = Callable[[Group, Values | None], Advantages]


def group_mean(group: Group, values: Values | None = None) -> Advantages:
    """r - mean(r). Uses no critic. (RLOO up to n / (n - 1); Dr. GRPO.)"""
    return _spread(group, _centred(group))


def standardised(
    group: Group, values: Values | None = None, *, epsilon: float = 1e-6
) -> Advantages:
    """(r - mean(r)) / (std(r) + epsilon), the population's std. Uses no critic. (GRPO.)"""
    centred = _centred(group)
    std = math.sqrt(math.fsum(c * c for c in centred.values()) / max(len(centred), 1))
    return _spread(group, {sample: c / (std + epsilon) for sample, c in centred.items()})


def _centred(group: Group) -> dict[int, float]:
    """Reward minus mean by sample; exactly 0 where all rewards are equal."""
    rewards = {
        m.key.sample: float(m.reward)
        for m in group.members
        if m.copy_of is None and m.valid and m.reward is not None
    }
    for sample, reward in rewards.items():
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of sample {sample}, {group.task} {group.prompt}")
    if len(set(rewards.values())) <= 1:
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(rewards.values()) / len(rewards)
    return {sample: reward - mean for sample, reward in rewards.items()}


def _spread(group: Group, by_sample: dict[int, float]) -> Advantages:
    return tuple(
        np.where(m.loss_mask, np.float32(by_sample.get(m.key.sample, 0.0)), np.float32(0))
        for m in group.members
    )
