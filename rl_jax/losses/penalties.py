"""[P] Penalties and bonuses: terms beside the surrogate.

They act on every sampled token, whether a mask dropped it or not, and heed no factor: what keeps
a policy near another one must not end where it went far.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.losses.arguments import one_of, positive
from rl_jax.losses.estimators import ESTIMATORS, Estimator, estimate
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.types import (
    BEHAVIOR,
    CURRENT,
    ENTROPY,
    REFERENCE,
    LossTransform,
    Metrics,
    Scores,
    Terms,
    check_score,
    sampled,
    stateless,
)
from rl_jax.metrics.states import Mean


def kl(
    reference: str = REFERENCE,
    estimator: Estimator = "k3",
    *,
    coefficient: float,
    importance: bool = False,
    name: str = "kl",
) -> LossTransform:
    """loss_t += coefficient x KL(current || reference), estimated at the sampled token.

    x = log reference - log current, cut to +-20; see `estimate` for k1, k2 and k3. `importance`
    multiplies by current / behavior with the gradient through both, which makes the gradient that
    of the divergence itself, off-policy too: DeepSeek-V3.2 (arXiv 2512.02556). Without it
    the gradient of k1 is 0 in expectation, that of k2 is the divergence's on-policy, that of k3 the
    reverse divergence's. `reference` may be any log-probability of the menu; "teacher(x)" distils.
    NAME/nats is the mean estimate.
    """
    positive(name, "coefficient", coefficient)
    one_of(name, "estimator", estimator, ESTIMATORS)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        nats = _divergence(scores, reference, estimator, name)
        if importance:
            nats = nats * jnp.exp(_log_ratio(scores, scores.current, scores.behavior))
        return _added(scores, terms, coefficient * nats, name, nats)

    return stateless(name, apply, (reference,))


def adaptive_kl(
    target: float,
    horizon: float,
    initial: float,
    reference: str = REFERENCE,
    estimator: Estimator = "k3",
    *,
    name: str = "adaptive_kl",
) -> LossTransform:
    """`kl` with a coefficient that steers the divergence to `target` nats per token.

    After each update, coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) x min(n / horizon, 1), n
    the sampled tokens of the batch, so it stays positive; it begins at `initial`. Source:
    Ziegler et al. 2019 (arXiv 1909.08593), who count episodes and their sums instead of tokens.
    NAME/coefficient tells it.
    """
    for argument, value in (("target", target), ("horizon", horizon), ("initial", initial)):
        positive(name, argument, value)
    one_of(name, "estimator", estimator, ESTIMATORS)
    needs = frozenset({check_score(reference, name)}) - {CURRENT, BEHAVIOR}

    def stats(scores: Scores) -> tuple[Array, Array]:
        nats = _divergence(scores, reference, estimator, name)
        return jnp.sum(jax.lax.stop_gradient(nats)), jnp.sum(sampled(scores))

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        nats = _divergence(scores, reference, estimator, name)
        terms, metrics = _added(scores, terms, state * nats, name, nats)
        everywhere = jnp.broadcast_to(state, nats.shape)
        return terms, metrics | {f"{name}/coefficient": Mean.of(everywhere, sampled(scores))}

    def advance(state: Any, stats: Any) -> Any:
        total, count = stats
        error = jnp.clip(total / jnp.maximum(count, 1.0) / target - 1.0, -0.2, 0.2)
        return state * (1.0 + error * jnp.minimum(count / horizon, 1.0))

    return LossTransform(name, needs, lambda: jnp.float32(initial), stats, apply, advance)


def entropy_bonus(coefficient: float, *, name: str = "entropy_bonus") -> LossTransform:
    """loss_t -= coefficient x entropy of the policy's distribution at the token. NAME/nats tells
    the mean."""
    positive(name, "coefficient", coefficient)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        nats = jnp.where(scores.mask, scores.score(ENTROPY, name), 0.0)
        return _added(scores, terms, -coefficient * nats, name, nats)

    return stateless(name, apply, (ENTROPY,))


def squared_log_ratio(coefficient: float, *, name: str = "squared_log_ratio") -> LossTransform:
    """loss_t += coefficient x (log r_t)^2 of the ratio under consideration. NAME/squared tells the
    mean square. Source: Kimi K2.5 (arXiv 2602.02276)."""
    positive(name, "coefficient", coefficient)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        squared = jnp.square(jnp.where(scores.mask, terms.log_ratio, 0.0))
        known = jax.lax.stop_gradient(squared)
        metrics = {f"{name}/squared": Mean.of(known, sampled(scores))}
        return terms._replace(loss=terms.loss + coefficient * squared), metrics

    return stateless(name, apply)


def _divergence(
    scores: Scores, reference: str, estimator: Estimator, asked_by: str
) -> Float[Array, "R L"]:
    other = jax.lax.stop_gradient(scores.score(reference, asked_by))
    return estimate(estimator, _log_ratio(scores, other, scores.current))


def _log_ratio(
    scores: Scores, numerator: Float[Array, "R L"], denominator: Float[Array, "R L"]
) -> Float[Array, "R L"]:
    apart = jnp.where(scores.mask, numerator - denominator, 0.0)
    return jnp.clip(apart, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _added(
    scores: Scores, terms: Terms, loss: Float[Array, "R L"], name: str, nats: Float[Array, "R L"]
) -> tuple[Terms, Metrics]:
    loss = jnp.where(scores.mask, loss, 0.0)
    metrics = {f"{name}/nats": Mean.of(jax.lax.stop_gradient(nats), sampled(scores))}
    return terms._replace(loss=terms.loss + loss), metrics
