"""[N] Reductions: per-token weights of a whole batch, computed on the host.

The weights are over the original mask: a token that a transform masks stays in the denominator.
A padding copy (`copy_of`) shares one weight with its original, so padding moves nothing; the
trajectories of a rollout that fanned out (one key, `copy_of` None) each count in full. A failed
trajectory and one without a sampled token weigh and count nothing. A batch in which nothing weighs
anything is a ValueError.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from rl_jax.losses.types import Reduction
from rl_jax.trajectories.types import Status, Trajectory


def token_mean(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Every sampled token of the batch weighs the same; the weights sum to 1. (DAPO 2503.14476.)"""
    return _mean_of_means("token_mean", trajectories, lambda t: None)


def token_sum(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Every sampled token weighs 1."""
    return [_weigh(t, share) for t, share in _counted("token_sum", trajectories)]


def sequence_mean_token_mean(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The mean over trajectories of the mean over tokens; sums to 1. (GRPO 2402.03300.)"""
    counted = _counted("sequence_mean_token_mean", trajectories)
    sequences = _total(counted)
    return [_weigh(t, share / (sequences * max(_sampled(t), 1))) for t, share in counted]


def sequence_mean_token_sum(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The mean over trajectories of the sum over tokens; sums to the mean number of tokens."""
    counted = _counted("sequence_mean_token_sum", trajectories)
    sequences = _total(counted)
    return [_weigh(t, share / sequences) for t, share in counted]


def constant_norm(length: int) -> Reduction:
    """The sum over tokens / (trajectories x `length`), usually the limit of a trajectory's tokens.

    So a token weighs the same in a long and a short trajectory. (Dr. GRPO, arXiv 2503.20783.)
    """
    if not length >= 1:
        raise ValueError(f"constant_norm: length must be at least 1 token, got {length}")

    def reduction(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        counted = _counted("constant_norm", trajectories)
        sequences = _total(counted)
        return [_weigh(t, share / (sequences * length)) for t, share in counted]

    return reduction


def prompt_mean(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The mean over prompts of the mean over a prompt's tokens; sums to 1. (ScaleRL 2510.13786.)"""
    return _mean_of_means("prompt_mean", trajectories, lambda t: t.key[:2])


def rollout_mean(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The mean over rollouts of the mean over the tokens of all of a rollout's trajectories.

    Sums to 1; differs from `sequence_mean_token_mean` where rollouts fanned out.
    """
    return _mean_of_means("rollout_mean", trajectories, _rollout)


_Counted = list[tuple[Trajectory, float]]
"""Trajectories with the part of one that each stands for."""


def _mean_of_means(
    name: str, trajectories: Sequence[Trajectory], unit: Callable[[Trajectory], Hashable]
) -> list[np.ndarray]:
    """The mean over units of the mean over a unit's sampled tokens."""
    counted = _counted(name, trajectories)
    tokens: dict[Hashable, list[float]] = {}
    for t, share in counted:
        if share:
            tokens.setdefault(unit(t), []).append(share * _sampled(t))
    scale = {own: 1.0 / (len(tokens) * math.fsum(counts)) for own, counts in tokens.items()}
    return [_weigh(t, share * scale.get(unit(t), 0.0)) for t, share in counted]


def _counted(name: str, trajectories: Sequence[Trajectory]) -> _Counted:
    """The share of every trajectory: 1 / (times it is there), 0 where there is nothing to weigh."""
    originals, there = Counter(), Counter()
    streams = [_stream(t) for t in trajectories]
    for t, stream in zip(trajectories, streams, strict=True):
        there[stream] += 1
        originals[stream] += t.copy_of is None
    counted = [
        (t, max(originals[s], 1) / there[s] if _weighs(t) else 0.0)
        for t, s in zip(trajectories, streams, strict=True)
    ]
    if not any(share for _, share in counted):
        raise ValueError(
            f"{name}: no trajectory of the batch that did not fail has a sampled token: loss_mask "
            "is false everywhere"
        )
    return counted


def _rollout(trajectory: Trajectory) -> Hashable:
    return trajectory.key[:3]


def _stream(trajectory: Trajectory) -> Hashable:
    """Tells the trajectories of a rollout apart, but not a copy from its original."""
    return _rollout(trajectory), trajectory.tokens.tobytes(), trajectory.versions.tobytes()


def _sampled(trajectory: Trajectory) -> int:
    return int(trajectory.loss_mask.sum())


def _weighs(trajectory: Trajectory) -> bool:
    return trajectory.status is not Status.FAILED and bool(trajectory.loss_mask.any())


def _total(counted: _Counted) -> float:
    return math.fsum(share for _, share in counted)


def _weigh(trajectory: Trajectory, weight: float) -> np.ndarray:
    return np.where(trajectory.loss_mask, np.float32(weight), np.float32(0))
