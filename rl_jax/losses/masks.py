"""[P] Masks: tokens and trajectories that lose their surrogate and stay in the denominator.

Every mask looks at detached values, in log space where it looks at a ratio, and clears
`Terms.kept`; NAME/dropped is the share of the sampled tokens that it was the first to drop.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_jax.losses.arguments import inside_unit, one_of, ordered, positive
from rl_jax.losses.combine import chain
from rl_jax.losses.estimators import ESTIMATORS, Estimator, estimate
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.ratios import LEVELS, Level
from rl_jax.losses.segments import segment_any, segment_mean, segment_sum
from rl_jax.losses.types import (
    Loss,
    LossTransform,
    Metrics,
    Scores,
    Terms,
    drop,
    sampled,
    stateless,
)
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean

Divergence = Literal["tv", "kl"]


def two_sided_mask(
    eps_low: float, eps_high: float, *, name: str = "two_sided_mask"
) -> LossTransform:
    """Keeps 1 - eps_low < ratio < 1 + eps_high (open band); NAME/below and /above are its sides.

    Source: double-sided importance sampling, GLM-5 (arXiv 2602.15763) sec. 4.1.
    """
    low = math.log1p(-inside_unit(name, "eps_low", eps_low))
    high = math.log1p(positive(name, "eps_high", eps_high))

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        known = jax.lax.stop_gradient(terms.log_ratio)
        return _drop_sides(name, scores, terms, known <= low, known >= high)

    return stateless(name, apply)


def band_mask(low: float | None, high: float | None, *, name: str = "band_mask") -> LossTransform:
    """Keeps low <= ratio <= high (closed band, None leaves a side open), whatever the advantage.

    NAME/below and NAME/above are its sides. Source: IcePop (arXiv 2510.18855).
    """
    ordered(name, low, high)
    floor = -math.inf if low is None else math.log(positive(name, "low", low))
    ceiling = math.inf if high is None else math.log(positive(name, "high", high))

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        known = jax.lax.stop_gradient(terms.log_ratio)
        return _drop_sides(name, scores, terms, known < floor, known > ceiling)

    return stateless(name, apply)


def _drop_sides(
    name: str, scores: Scores, terms: Terms, below: Bool[Array, "R L"], above: Bool[Array, "R L"]
) -> tuple[Terms, Metrics]:
    terms, metrics = drop(name, scores, terms, below | above)
    for side, where in (("below", below), ("above", above)):
        metrics[f"{name}/{side}"] = Mean.of(where.astype(jnp.float32), sampled(scores))
    return terms, metrics


def veto(threshold: float = 1e-4, *, name: str = "veto") -> LossTransform:
    """Drops every trajectory with a sampled token whose ratio is below `threshold`.

    Source: the veto of masked importance sampling, Liu, Li et al., "When Speed Kills Stability"
    (2025). Ratios are cut at e^-20, so `threshold` must lie above that.
    """
    least = math.exp(-LOG_RATIO_BOUND)
    if not least < threshold < 1.0:
        raise ValueError(f"{name}: threshold must lie in ({least:.1e}, 1), got {threshold}")
    floor = math.log(threshold)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        hopeless = scores.mask & (jax.lax.stop_gradient(terms.log_ratio) < floor)
        return drop(name, scores, terms, segment_any(hopeless, scores.segments))

    return stateless(name, apply)


def mask_stale(tau: int, *, name: str = "mask_stale") -> LossTransform:
    """Keeps tokens whose lag is at most `tau`. NAME/stale is the share of the others, dropped
    before or not."""
    if not tau >= 0:
        raise ValueError(f"{name}: tau must be at least 0, got {tau}")

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        stale = scores.lag > tau
        terms, metrics = drop(name, scores, terms, stale)
        share = Mean.of(stale.astype(jnp.float32), sampled(scores))
        return terms, metrics | {f"{name}/stale": share}

    return stateless(name, apply)


def masked_above(loss: Loss, tau: int) -> Loss:
    """`loss` without the tokens whose lag is above `tau`; its reduction still counts them.

    Their share is told as stale_share: the outermost's, where one stands in another.
    """
    inner = loss.transform
    name = f"{inner.name}_again" if inner.name.startswith(_MASKED_ABOVE) else _MASKED_ABOVE
    masked = chain(mask_stale(tau, name=name), inner)

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        terms, metrics = masked.apply(scores, terms, stats, state)
        share = metrics.pop(f"{name}/stale")
        return terms, metrics | {names.STALE_SHARE: share}

    return loss._replace(transform=masked._replace(name=name, apply=apply))


_MASKED_ABOVE = "masked_above"


def divergence_mask(
    delta: float,
    kind: Divergence = "tv",
    sign_aware: bool = True,
    *,
    name: str = "divergence_mask",
) -> LossTransform:
    """Drops tokens whose probability moved too far: by p - mu, p current and mu sampling policy.

    "tv" compares |p - mu| with `delta`, "kl" KL(Bernoulli(mu) || Bernoulli(p)) in nats.
    `sign_aware` drops only what the advantage pushes further: p > mu at A > 0 and p < mu at A < 0,
    as DPPO (arXiv 2602.04879) does; without it both sides, as prime-rl's IPO. The ratio under
    consideration plays no role.
    """
    positive(name, "delta", delta)
    one_of(name, "kind", kind, ("tv", "kl"))

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        current, behavior = jax.lax.stop_gradient((scores.current, scores.behavior))
        moved = jnp.exp(jnp.minimum(current, 0.0)) - jnp.exp(jnp.minimum(behavior, 0.0))
        far = (jnp.abs(moved) if kind == "tv" else _binary_kl(behavior, current)) > delta
        pushed = jnp.sign(moved) * jnp.sign(terms.advantages) > 0
        return drop(name, scores, terms, far & pushed if sign_aware else far)

    return stateless(name, apply)


def _binary_kl(log_mu: Float[Array, "R L"], log_p: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """KL of two coins from the logarithm of their probabilities, finite for all of them."""
    log_mu, log_p = (jnp.clip(x, -_FAR, 0.0) for x in (log_mu, log_p))
    rest_mu, rest_p = (jnp.maximum(-jnp.expm1(x), _TINY) for x in (log_mu, log_p))
    return jnp.exp(log_mu) * (log_mu - log_p) + rest_mu * (jnp.log(rest_mu) - jnp.log(rest_p))


_FAR = 1e4
"""Log-probabilities below minus this are probabilities of 0 many times over."""
_TINY = 1e-30


def estimator_mask(
    estimator: Estimator,
    low: float | None,
    high: float | None,
    level: Level = "token",
    *,
    name: str = "estimator_mask",
) -> LossTransform:
    """Keeps tokens whose KL estimate lies in [low, high] nats; None leaves a side open.

    k1, k2 or k3 of KL(denominator || numerator) of the ratio under consideration; `level`
    "geometric" takes the mean and "sequence" the sum of a trajectory's estimates and drops it
    whole. Source: the rejection filters of masked importance sampling (verl's rollout correction,
    where k1 is given by its bounds on the ratio instead: low = -log upper, high = -log lower).
    """
    one_of(name, "estimator", estimator, ESTIMATORS)
    one_of(name, "level", level, LEVELS)
    ordered(name, low, high)
    floor, ceiling = -math.inf if low is None else low, math.inf if high is None else high

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        value = estimate(estimator, jax.lax.stop_gradient(terms.log_ratio))
        value = jnp.where(scores.mask, value, 0.0)
        if level == "geometric":
            value = segment_mean(value, scores.mask, scores.segments)
        elif level == "sequence":
            value = segment_sum(value, scores.segments)
        return drop(name, scores, terms, (value < floor) | (value > ceiling))

    return stateless(name, apply)


def sequence_kl_mask(delta: float, *, name: str = "sequence_kl_mask") -> LossTransform:
    """Drops tokens with A < 0 in trajectories that the policy moved away from: mean of minus the
    log-ratio above `delta`.

    With one advantage per trajectory that is the whole trajectory. The ratio under consideration
    says which policy it moved away from. Source: off-policy sequence masking of DeepSeek-V3.2
    (arXiv 2512.02556), whose old policy is the sampler with the inference engine's probabilities;
    slime (OPSM) takes the trainer's own unless told to use those.
    """
    positive(name, "delta", delta)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        known = jax.lax.stop_gradient(terms.log_ratio)
        divergence = segment_mean(-known, scores.mask, scores.segments)
        return drop(name, scores, terms, (divergence > delta) & (terms.advantages < 0))

    return stateless(name, apply)
