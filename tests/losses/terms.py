"""Scores by hand, and what a chain makes of them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import Array
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms
from rl_jax.metrics.states import Mean


def scores(
    current: Any, behavior: Any, advantages: Any = 1.0, mask: Any = True, lag: Any = 0
) -> Scores:
    """One row; scalars are repeated."""
    row = jnp.atleast_2d(jnp.asarray(current, jnp.float32))

    def like(values: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(values, dtype), row.shape)

    return Scores(
        row,
        like(behavior, jnp.float32),
        like(mask, jnp.bool_),
        like(advantages, jnp.float32),
        like(lag, jnp.int32),
    )


def applied(transform: LossTransform, given: Scores) -> tuple[Terms, Metrics]:
    """The chain on fresh terms, without statistics."""
    zeros = jnp.zeros_like(given.current)
    return transform.apply(given, Terms(zeros, zeros + 1.0, zeros), (), transform.init())


def numbers(metrics: Metrics) -> dict[str, float]:
    return {name: float(mean.compute()) for name, mean in metrics.items()}


def uniform(given: Scores) -> np.ndarray:
    """token_mean's weights of one row."""
    mask = np.asarray(given.mask, np.float32)
    return mask / mask.sum()


def running_count() -> LossTransform:
    """Divides by the batch's number of sampled tokens and counts what it saw in its state."""

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        return terms._replace(factor=terms.factor / stats), {"seen": Mean.of(state[None])}

    return LossTransform(
        needs=frozenset(),
        init=lambda: jnp.float32(10),
        stats=lambda scores: scores.mask.sum().astype(jnp.float32),
        apply=apply,
        advance=lambda state, stats: state + stats,
    )
