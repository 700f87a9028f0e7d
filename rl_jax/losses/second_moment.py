"""[P] The mask that keeps the second moment of the log-ratio small over the whole batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rl_jax.losses.arguments import positive
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, drop
from rl_jax.metrics.states import Mean

BINS = 256
LEAST, MOST = 1e-6, LOG_RATIO_BOUND**2
"""Of (log d)^2: everything smaller is in the lowest bin; log-ratios are cut at the largest."""


class Moments(NamedTuple):
    """Number and sum of (log d)^2 of a batch's pushed tokens at or below each edge."""

    count: Float[Array, "B"]
    total: Float[Array, "B"]


def second_moment_mask(threshold: float, *, name: str = "second_moment_mask") -> LossTransform:
    """Drops the tokens of largest (log d)^2 until its mean over the others is <= `threshold`.

    d = current / behavior. Only tokens that their advantage pushes further away are looked at,
    A > 0 with d > 1 and A < 0 with d < 1: the mean is over them, and the others all stay. It is
    over the batch, so a first pass sums 256 bins evenly spaced in log (log d)^2 from 1e-6 to 400:
    the cut falls on an edge, 8 % apart in (log d)^2, and never exceeds the threshold. Advantages
    are those of the batch, not what a part before made of them. NAME/second_moment is the mean that
    is kept. Source: M2PO (arXiv 2510.01161). Which tokens count is as in the authors' code, which
    clips those above the cut and lets them count at it, where the paper's text masks them; AReaL
    takes the mean over all tokens, whatever the sign.
    """
    positive(name, "threshold", threshold)

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        cut = _cut(stats, threshold)
        squared, pushed = _squared(scores)
        terms, metrics = drop(name, scores, terms, pushed & (squared > cut))
        kept = (pushed & (squared <= cut)).astype(jnp.float32)
        return terms, metrics | {f"{name}/second_moment": Mean.of(squared, kept)}

    return LossTransform(
        name=name,
        needs=frozenset(),
        init=lambda: (),
        stats=_moments,
        apply=apply,
        advance=lambda state, stats: state,
    )


def _edges() -> np.ndarray:
    """Zero, then evenly spaced in log; the last is the bound itself, or rounding might lose it."""
    edges = np.geomspace(LEAST, MOST, BINS - 1)
    return np.array([0.0, *edges[:-1], MOST], np.float32)


def _squared(scores: Scores) -> tuple[Float[Array, "R L"], Bool[Array, "R L"]]:
    log_ratio = jax.lax.stop_gradient(scores.current - scores.behavior)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_ratio = jnp.where(scores.mask, log_ratio, 0.0)
    pushed = scores.mask & (jnp.sign(log_ratio) * jnp.sign(scores.advantages) > 0)
    return jnp.square(log_ratio), pushed


def _moments(scores: Scores) -> Moments:
    squared, pushed = _squared(scores)

    def up_to(edge: Float[Array, ""]) -> tuple[Array, Array]:
        below = pushed & (squared <= edge)
        return below.astype(jnp.float32).sum(), jnp.where(below, squared, 0.0).sum()

    count, total = jax.lax.map(up_to, jnp.asarray(_edges()))
    return Moments(count, total)


def _cut(moments: Moments, threshold: float) -> Float[Array, ""]:
    """The largest edge that keeps the mean small; 0 where no other does, which drops all pushed."""
    small = moments.total <= threshold * moments.count
    return jnp.max(jnp.where(small, jnp.asarray(_edges()), 0.0))
