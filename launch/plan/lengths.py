"""[N] The rollouts of a group as a table: lognormal lengths, and who is the slowest.

Lengths are capped. A rollout's time grows with its tokens, so the longest of a group is its last.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from launch.plan.inputs import RolloutRates

POINTS, PROMPTS, REACH = 320, 41, 6.0
"""Pieces of a normal quantity between -REACH and REACH deviations."""
_NORMAL = NormalDist()


class Lengths(NamedTuple):
    """Sampled tokens at pieces of what is a rollout's own, for pieces of what its group shares."""

    tokens: np.ndarray
    """float64[prompts, points], ascending in each row."""
    turns: np.ndarray
    """The same shape."""
    weights: np.ndarray
    """The same shape: probability of a rollout; sums to 1."""
    slowest: np.ndarray
    """The same shape: probability that this is the slowest of a group; sums to 1."""
    size: int
    """Rollouts of a group."""

    def mean(self, values: np.ndarray) -> float:
        """Over rollouts, of an array like `tokens`."""
        return float((values * self.weights).sum())

    @property
    def mean_tokens(self) -> float:
        return self.mean(self.tokens)

    @property
    def mean_turns(self) -> float:
        return self.mean(self.turns)

    def by_tokens(self, values: np.ndarray) -> float:
        """Mean over tokens of a rollout's value, an array like `tokens`."""
        return self.mean(values * self.tokens) / self.mean_tokens

    def of_slowest(self, seconds: np.ndarray) -> float:
        """Mean over groups of the largest of `seconds`, an array like `tokens`."""
        return float((seconds * self.slowest).sum())

    def slowest_by_tokens(self, seconds: np.ndarray) -> float:
        """Mean over tokens of the largest `seconds` in the token's group."""
        below = np.cumsum(self.tokens * self.weights, 1) / np.cumsum(self.weights, 1)
        group = self.tokens + (self.size - 1) * below
        return self.of_slowest(seconds * group) / (self.size * self.mean_tokens)

    def slowest_quantile(self, seconds: np.ndarray, share: float) -> float:
        """The quantile over groups of the largest of `seconds`."""
        order = np.argsort(seconds, axis=None)
        reached = np.cumsum(self.slowest.ravel()[order])
        return float(seconds.ravel()[order][np.searchsorted(reached, share)])


def lengths_of(rates: RolloutRates, size: int, cap: float) -> Lengths:
    """Of groups of `size` rollouts of at most `cap` tokens, at least one."""
    shared, own = _pieces(PROMPTS), _pieces(POINTS)
    z = math.sqrt(rates.same_in_group) * _centres(shared)[:, None]
    z = z + math.sqrt(1 - rates.same_in_group) * _centres(own)[None]
    tokens = rates.sampled_tokens * np.exp(rates.sigma * z - rates.sigma**2 / 2)
    tokens = np.clip(tokens, 1.0, cap)
    turns = np.maximum(1.0, np.rint(tokens / rates.tokens_per_turn))
    prompts = np.diff(shared)[:, None]
    return Lengths(
        tokens, turns, prompts * np.diff(own)[None], prompts * np.diff(own**size)[None], size
    )


def _pieces(count: int) -> np.ndarray:
    """float64[count + 1]: probabilities below the edges of equally wide pieces; 0 to 1."""
    edges = np.linspace(-REACH, REACH, count + 1)
    reached = np.array([_NORMAL.cdf(edge) for edge in edges])
    reached[0], reached[-1] = 0.0, 1.0
    return reached


def _centres(pieces: np.ndarray) -> np.ndarray:
    count = len(pieces) - 1
    edges = np.linspace(-REACH, REACH, count + 1)
    return (edges[1:] + edges[:-1]) / 2
