"""[N] Which versions' caches a trajectory's tokens were sampled from, read off its segments.

A token's version says which weights produced it, its cache may be older: a sampler that keeps its
caches over a push mixes versions. Ratios do not mind; a comparison with one forward pass does.
"""

import numpy as np

from rl_jax.trajectories.types import NOT_SAMPLED, Trajectory


def cache_versions(trajectory: Trajectory) -> np.ndarray:
    """int32[T]: for each sampled token the oldest version in the cache it was sampled from.

    NOT_SAMPLED for other tokens, and where the segments do not cover all tokens before one.
    """
    count = len(trajectory.tokens)
    cache = np.full(count, NOT_SAMPLED, np.int32)
    oldest = np.full(count + 1, NOT_SAMPLED, np.int32)
    reached = 0
    for start, end, version, _ in trajectory.segments:
        cache[start:end] = version
        # Token p + 1 is sampled when position p enters for the first time; later it is recomputed.
        if end > reached:
            oldest[reached + 1 : end + 1] = np.minimum.accumulate(cache[:end])[reached:]
            reached = min(end, count)
    return np.where(trajectory.loss_mask, oldest[:count], np.int32(NOT_SAMPLED))


def pure(trajectory: Trajectory) -> np.ndarray:
    """bool[T]: sampled tokens whose whole cache had the token's own version."""
    return trajectory.loss_mask & (cache_versions(trajectory) == trajectory.versions)
