"""Scores by hand, and what a chain makes of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import Array
from rl_jax.losses.evaluate import evaluate, start
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms
from rl_jax.metrics.states import Mean


def scores(
    current: Any,
    behavior: Any,
    advantages: Any = 1.0,
    mask: Any = True,
    lag: Any = 0,
    *,
    segments: Any = 0,
    returns: Any = 0.0,
    tasks: Any = 0,
    **others: Any,
) -> Scores:
    """One row; scalars are repeated. `teacher_x` stands for the score "teacher(x)"."""
    row = jnp.atleast_2d(jnp.asarray(current, jnp.float32))

    def like(values: Any, dtype: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(values, dtype), row.shape)

    return Scores(
        current=row,
        behavior=like(behavior, jnp.float32),
        mask=like(mask, jnp.bool_),
        advantages=like(advantages, jnp.float32),
        lag=like(lag, jnp.int32),
        segments=like(segments, jnp.int32),
        tasks=like(tasks, jnp.int32),
        returns=like(returns, jnp.float32),
        others={
            re.sub(r"teacher_(\w+)", r"teacher(\1)", name): like(values, jnp.float32)
            for name, values in others.items()
        },
    )


def applied(transform: LossTransform, given: Scores) -> tuple[Terms, Metrics]:
    """The chain on fresh terms and the statistics of `given` alone; nothing is checked."""
    stats = transform.stats(given) if transform.stats else ()
    return transform.apply(given, start(given), stats, transform.init())


def gradient(transform: LossTransform, given: Scores) -> np.ndarray:
    """Of the sum of the terms, with respect to the current log-probabilities of the row."""

    def total(current: Array) -> Array:
        return jnp.sum(applied(transform, given._replace(current=current))[0].loss)

    return np.asarray(jax.grad(total)(given.current))[0]


def reported(transform: LossTransform, given: Scores) -> dict[str, float]:
    """What `evaluate` says of itself, the parts' own metrics included."""
    return numbers(evaluate(transform, given)[1])


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
        name="running_count",
        needs=frozenset(),
        init=lambda: jnp.float32(10),
        stats=lambda scores: scores.mask.sum().astype(jnp.float32),
        apply=apply,
        advance=lambda state, stats: state + stats,
    )
