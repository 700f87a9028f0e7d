"""[P] Importance ratios: which two policies a chain compares, token by token or as a whole.

A ratio sets `Terms.log_ratio` and nothing else; bounds, masks and objectives say what it does.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.losses.arguments import one_of
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.segments import segment_mean, segment_sum
from rl_jax.losses.types import (
    BEHAVIOR,
    CURRENT,
    PROXIMAL,
    LossTransform,
    Metrics,
    Scores,
    Terms,
    sampled,
    stateless,
)
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean

Level = Literal["token", "geometric", "sequence"]
LEVELS = ("token", "geometric", "sequence")
INTERPOLATED = "interpolated"
"""Stands for the proximal policy that `interpolated` makes up; no score has this name."""


def ratio(
    numerator: str = CURRENT,
    denominator: str = BEHAVIOR,
    *,
    level: Level = "token",
    name: str | None = None,
) -> LossTransform:
    """log_ratio := log numerator - log denominator, two scores of the menu; cut to +-20.

    Only the current policy carries a gradient. `level` "geometric" tells every token the mean over
    its trajectory's sampled tokens, "sequence" the sum; their gradient is that of the token's own
    log-probability, as in GSPO (arXiv 2507.18071): s = sg(s) + log p - sg(log p). A ratio
    that is cut has no gradient. Metrics are NAME/mean, NAME/log_abs and NAME/log_squared, where
    NAME is ratio/NUMERATOR_DENOMINATOR unless given.
    """
    one_of("ratio", "level", level, LEVELS)
    if numerator == denominator:
        raise ValueError(f"ratio: numerator and denominator are both {numerator!r}")
    part = f"{numerator}_over_{denominator}"

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        top, bottom = (_logprob(scores, score, part) for score in (numerator, denominator))
        return _set(scores, terms, top - bottom, level, name or names.ratio(numerator, denominator))

    return stateless(part, apply, (numerator, denominator))


def current_over_behavior(*, level: Level = "token", name: str | None = None) -> LossTransform:
    """The policy that trains over the one that sampled, with all of mismatch and staleness.

    The denominator is the recorded log-probability, whatever happened to the cache since.
    """
    return ratio(CURRENT, BEHAVIOR, level=level, name=name)


def current_over_proximal(
    *, level: Level = "token", interpolated: bool = False, name: str | None = None
) -> LossTransform:
    """How far the policy moved since the newest push: the ratio of PPO and its kin.

    `interpolated`: see `proximal_over_behavior`.
    """
    if interpolated:
        return _interpolated(CURRENT, INTERPOLATED, level, name)
    return ratio(CURRENT, PROXIMAL, level=level, name=name)


def proximal_over_behavior(
    *, level: Level = "token", interpolated: bool = False, name: str | None = None
) -> LossTransform:
    """The policy of the newest push over the one that sampled: what mismatch and lag did.

    `interpolated` needs no score of the proximal policy: its log-probability is put between the
    sampling and the current one by version, log prox = log mu + a (log p - log mu) with
    a = lag / (lag + 1). Source: A-3PO (arXiv 2512.06547), AReaL.
    """
    if interpolated:
        return _interpolated(INTERPOLATED, BEHAVIOR, level, name)
    return ratio(PROXIMAL, BEHAVIOR, level=level, name=name)


def _interpolated(
    numerator: str, denominator: str, level: Level, name: str | None
) -> LossTransform:
    one_of("ratio", "level", level, LEVELS)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        lag = scores.lag.astype(jnp.float32)
        apart = jax.lax.stop_gradient(scores.current) - scores.behavior
        proximal = scores.behavior + lag / (lag + 1.0) * apart
        pair = (
            (proximal, scores.behavior) if denominator == BEHAVIOR else (scores.current, proximal)
        )
        prefix = name or names.ratio(numerator, denominator)
        return _set(scores, terms, pair[0] - pair[1], level, prefix)

    return stateless(f"{numerator}_over_{denominator}", apply)


def _logprob(scores: Scores, score: str, asked_by: str) -> Array:
    logprob = scores.score(score, asked_by)
    return logprob if score == CURRENT else jax.lax.stop_gradient(logprob)


def _set(
    scores: Scores, terms: Terms, log_ratio: Array, level: str, prefix: str
) -> tuple[Terms, Metrics]:
    log_ratio = jnp.where(scores.mask, log_ratio, 0.0)
    if level == "token":
        log_ratio = jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    else:
        log_ratio = _levelled(scores, log_ratio, level)
    known = jax.lax.stop_gradient(log_ratio)
    each = {"mean": jnp.exp(known), "log_abs": jnp.abs(known), "log_squared": jnp.square(known)}
    metrics = {f"{prefix}/{what}": Mean.of(v, sampled(scores)) for what, v in each.items()}
    return terms._replace(log_ratio=log_ratio), metrics


def _levelled(scores: Scores, log_ratio: Array, level: str) -> Array:
    """The trajectory's value at every sampled token, with the gradient of the token's own."""
    known = jax.lax.stop_gradient(log_ratio)
    if level == "geometric":
        value = segment_mean(known, scores.mask, scores.segments)
    else:
        value = segment_sum(known, scores.segments)
    cut = jnp.where(scores.mask, jnp.clip(value, -LOG_RATIO_BOUND, LOG_RATIO_BOUND), 0.0)
    return jnp.where(jnp.abs(cut) < LOG_RATIO_BOUND, cut + (log_ratio - known), cut)


def ess_share(
    mean_weight: float | Float[Array, ""], mean_squared: float | Float[Array, ""]
) -> Float[Array, ""]:
    """Effective sample size over sample size, mean(w)^2 / mean(w^2), in (0, 1].

    1 where all weights are equal, 1 / n where one of n counts alone. 0 where every weight is 0.
    """
    some = jnp.asarray(mean_squared) > 0
    return jnp.where(some, jnp.square(mean_weight) / jnp.where(some, mean_squared, 1.0), 0.0)
