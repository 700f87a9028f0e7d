"""[P] Importance ratios and what may be done to them before they weigh a term."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, stateless
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean


def current_over_behavior() -> LossTransform:
    """Token ratio d = pi_current / pi_behavior, detached, as the factor of the surrogate.

    The denominator is the recorded log-probability, whatever happened to the cache since.
    """

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        log_ratio = jax.lax.stop_gradient(scores.current - scores.behavior)
        log_ratio = jnp.where(scores.mask, log_ratio, 0.0)
        sampled = scores.mask.astype(jnp.float32)
        metrics = {
            names.RATIO_MEAN: Mean.of(jnp.exp(log_ratio), sampled),
            "ratio/log_abs": Mean.of(jnp.abs(log_ratio), sampled),
        }
        return terms._replace(log_ratio=log_ratio, factor=jnp.exp(log_ratio)), metrics

    return stateless(apply)


def two_sided_mask(eps_low: float, eps_high: float) -> LossTransform:
    """Keeps the factor where 1 - eps_low < ratio < 1 + eps_high (open band), 0 elsewhere.

    Masked tokens get zero gradient and stay in the denominator of the reduction. The test is in log
    space, and `where` replaces the factor, so an infinite ratio never meets a zero.
    Source: double-sided importance sampling, GLM-5 (arXiv 2602.15763) sec. 4.1.
    """
    if not 0.0 < eps_low < 1.0:
        raise ValueError(f"two_sided_mask: eps_low must lie in (0, 1), got {eps_low}")
    if not eps_high > 0.0:
        raise ValueError(f"two_sided_mask: eps_high must be positive, got {eps_high}")
    low, high = math.log1p(-eps_low), math.log1p(eps_high)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        below, above = terms.log_ratio <= low, terms.log_ratio >= high
        factor = jnp.where(below | above, 0.0, terms.factor)
        sampled = scores.mask.astype(jnp.float32)
        metrics = {
            names.MASKED_SHARE: Mean.of((below | above).astype(jnp.float32), sampled),
            "mask/below": Mean.of(below.astype(jnp.float32), sampled),
            "mask/above": Mean.of(above.astype(jnp.float32), sampled),
        }
        return terms._replace(factor=factor), metrics

    return stateless(apply)


def mask_stale(tau: int) -> LossTransform:
    """Keeps the factor of tokens whose lag is at most `tau`, 0 elsewhere.

    As with every mask, what is masked stays in the denominator of the reduction.
    """
    if tau < 0:
        raise ValueError(f"mask_stale: tau must be at least 0, got {tau}")

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        stale = scores.lag > tau
        sampled = scores.mask.astype(jnp.float32)
        metrics = {names.STALE_SHARE: Mean.of(stale.astype(jnp.float32), sampled)}
        return terms._replace(factor=jnp.where(stale, 0.0, terms.factor)), metrics

    return stateless(apply)


def weight_moments() -> LossTransform:
    """Changes nothing; reports means of w and w^2, w the factor as the masks before it left it.

    Their `ess_share` says how many of the sampled tokens the estimate really rests on.
    """

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        sampled = scores.mask.astype(jnp.float32)
        metrics = {
            names.ESS_WEIGHT: Mean.of(terms.factor, sampled),
            names.ESS_WEIGHT_SQUARED: Mean.of(jnp.square(terms.factor), sampled),
        }
        return terms, metrics

    return stateless(apply)


def ess_share(
    mean_weight: float | Float[Array, ""], mean_squared: float | Float[Array, ""]
) -> Float[Array, ""]:
    """Effective sample size over sample size, mean(w)^2 / mean(w^2), in (0, 1].

    1 where all weights are equal, 1 / n where one of n counts alone. 0 where every weight is 0.
    """
    some = jnp.asarray(mean_squared) > 0
    return jnp.where(some, jnp.square(mean_weight) / jnp.where(some, mean_squared, 1.0), 0.0)
