"""[P] What may be done to a ratio before it weighs a term: bound it, then make it a weight.

Bounds detach the ratio: what comes after them gets its gradient from log p, not from the ratio.
"""

import math

import jax
import jax.numpy as jnp

from rl_jax.losses.arguments import ordered, positive
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, sampled, stateless
from rl_jax.metrics.states import Mean


def truncate(cap: float, *, name: str = "truncate") -> LossTransform:
    """ratio := min(ratio, cap), detached. NAME/above is the share that was cut.

    Source: truncated importance sampling, V-trace's rho bar (arXiv 1802.01561).
    """
    return _bounded(name, None, math.log(positive(name, "cap", cap)))


def clamp(low: float | None, high: float | None, *, name: str = "clamp") -> LossTransform:
    """ratio := min(max(ratio, low), high), detached; None leaves a side open.

    NAME/below and NAME/above are the shares that were moved. Source: CISPO (arXiv 2506.13585).
    """
    ordered(name, low, high)
    floor = None if low is None else math.log(positive(name, "low", low))
    ceiling = None if high is None else math.log(positive(name, "high", high))
    return _bounded(name, floor, ceiling)


def _bounded(name: str, floor: float | None, ceiling: float | None) -> LossTransform:
    """Between two log-ratios."""

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        known = jax.lax.stop_gradient(terms.log_ratio)
        touched = {}
        if floor is not None:
            touched["below"] = known < floor
        if ceiling is not None:
            touched["above"] = known > ceiling
        bounded = jnp.where(scores.mask, jnp.clip(known, floor, ceiling), 0.0)
        metrics = {
            f"{name}/{side}": Mean.of(where.astype(jnp.float32), sampled(scores))
            for side, where in touched.items()
        }
        return terms._replace(log_ratio=bounded), metrics

    return stateless(name, apply)


def weigh(*, name: str = "weigh") -> LossTransform:
    """factor := factor x sg(ratio). NAME/mean is the mean of the new factor, dropped tokens 0."""

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor = terms.factor * jnp.exp(jax.lax.stop_gradient(terms.log_ratio))
        kept = jnp.where(terms.kept, factor, 0.0)
        metrics = {f"{name}/mean": Mean.of(kept, sampled(scores))}
        return terms._replace(factor=factor), metrics

    return stateless(name, apply)
