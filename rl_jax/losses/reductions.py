"""[N] Reductions: per-token weights of a whole batch, computed on the host.

The weights are over the original mask: a token that a transform masks stays in the denominator.
Padding copies (`copy_of`) share one weight with their original, so padding moves nothing.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rl_jax.trajectories.types import Trajectory


def _member(trajectory: Trajectory) -> tuple[str, int, int]:
    key = trajectory.key
    return key.task, key.prompt, key.sample


def shares(trajectories: Sequence[Trajectory]) -> list[float]:
    """1 / (number of times the rollout appears), for each trajectory."""
    counts = Counter(_member(t) for t in trajectories)
    return [1.0 / counts[_member(t)] for t in trajectories]


def token_mean(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Every sampled token of the batch weighs the same; the weights sum to 1.

    A batch without a sampled token gets zero weights.
    """
    parts = shares(trajectories)
    total = sum(s * int(t.loss_mask.sum()) for s, t in zip(parts, trajectories, strict=True))
    scale = 1.0 / total if total else 0.0
    return [
        t.loss_mask.astype(np.float32) * np.float32(s * scale)
        for s, t in zip(parts, trajectories, strict=True)
    ]
