"""[P] Surrogates: where the gradient enters a chain.

Each adds its term where `Terms.kept` holds and 0 elsewhere, with what a dropped token holds
replaced before it is used, so no inf or nan of it reaches a value or a gradient.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.losses.arguments import inside_unit, positive
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.segments import segment_count, segment_mean, segment_sum
from rl_jax.losses.types import VALUE, LossTransform, Metrics, Scores, Terms, sampled, stateless
from rl_jax.metrics.states import Mean


def policy_gradient(*, name: str = "policy") -> LossTransform:
    """loss_t = -sg(factor_t A_t) log pi_current(a_t): the score function with a fixed weight."""

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        weight = _detached_factor(terms)
        # The inner `where`: 0 x -inf would be nan.
        logprob = jnp.where(terms.kept, scores.current, 0.0)
        loss = -weight * jax.lax.stop_gradient(terms.advantages) * logprob
        known = jax.lax.stop_gradient(scores.current)
        metrics = {f"{name}/neg_logprob": Mean.of(-known, sampled(scores))}
        return _added(terms, loss, weight), metrics

    return stateless(name, apply)


def importance_sampled(*, name: str = "importance_sampled") -> LossTransform:
    """loss_t = -factor_t r_t A_t with the gradient through r, no bound of its own.

    NAME/weight is the mean of factor x r, dropped tokens 0.
    """

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor, log_ratio = _detached_factor(terms), jnp.where(terms.kept, terms.log_ratio, 0.0)
        ratio = jnp.exp(log_ratio)
        weight = jnp.where(_flows(log_ratio), factor * jax.lax.stop_gradient(ratio), 0.0)
        loss = -factor * ratio * jax.lax.stop_gradient(terms.advantages)
        return _added(terms, loss, weight), {f"{name}/weight": Mean.of(weight, sampled(scores))}

    return stateless(name, apply)


def clipped(
    eps_low: float, eps_high: float, dual: float | None = None, *, name: str = "clipped"
) -> LossTransform:
    """loss_t = -factor_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t): PPO's surrogate.

    `dual` c > 1: where A < 0 the surrogate is at least c A, so a huge ratio has no gradient there.
    Shares of the sampled tokens that have no gradient for it: NAME/high (A > 0), NAME/low (A < 0),
    NAME/dual. Sources: PPO (arXiv 1707.06347) eq. 7, dual-clip PPO (arXiv 1912.09729).
    """
    floor = math.log1p(-inside_unit(name, "eps_low", eps_low))
    ceiling = math.log1p(positive(name, "eps_high", eps_high))
    if dual is not None and not 1.0 < dual < math.inf:
        raise ValueError(f"{name}: dual must be above 1 and finite, got {dual}")

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor, log_ratio = _detached_factor(terms), jnp.where(terms.kept, terms.log_ratio, 0.0)
        advantages = jax.lax.stop_gradient(terms.advantages)
        # Chosen by cases: at equal arguments the gradient of `minimum` is half of each.
        sides = {
            "high": ((advantages > 0) & (log_ratio > ceiling), 1.0 + eps_high),
            "low": ((advantages < 0) & (log_ratio < floor), 1.0 - eps_low),
        }
        if dual is not None:
            sides["dual"] = ((advantages < 0) & (log_ratio > math.log(dual)), dual)
        ratio, flows = jnp.exp(log_ratio), _flows(log_ratio)
        metrics = {}
        for side, (stuck, bound) in sides.items():
            ratio, flows = jnp.where(stuck, bound, ratio), flows & ~stuck
            metrics[f"{name}/{side}"] = Mean.of(stuck.astype(jnp.float32), sampled(scores))
        weight = jnp.where(flows, factor * jax.lax.stop_gradient(ratio), 0.0)
        return _added(terms, -factor * ratio * advantages, weight), metrics

    return stateless(name, apply)


def soft_gated(
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    *,
    name: str = "soft_gated",
) -> LossTransform:
    """loss_t = -factor_t A_t (4 / t) sigmoid(t (r_t - 1)), t one temperature per sign of A.

    The gradient falls off smoothly on both sides of r = 1, where it is that of r A. NAME/gate is
    the mean of 4 s (1 - s), that falling off, over the kept tokens. Source: SAPO (arXiv
    2511.20347).
    """
    positive(name, "temperature_positive", temperature_positive)
    positive(name, "temperature_negative", temperature_negative)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor, log_ratio = _detached_factor(terms), jnp.where(terms.kept, terms.log_ratio, 0.0)
        advantages = jax.lax.stop_gradient(terms.advantages)
        t = jnp.where(advantages > 0, temperature_positive, temperature_negative)
        ratio = jnp.exp(log_ratio)
        beyond = t * (ratio - 1.0)
        below, above = jax.nn.sigmoid(beyond), jax.nn.sigmoid(-beyond)
        # The derivative of what is close to 1 would cancel.
        share = jnp.where(beyond > 0, 1.0 - above, below)
        gate = jax.lax.stop_gradient(4.0 * below * above)
        ratio = jax.lax.stop_gradient(ratio)
        weight = jnp.where(_flows(log_ratio), factor * gate * ratio, 0.0)
        metrics = {f"{name}/gate": Mean.of(gate, terms.kept.astype(jnp.float32))}
        return _added(terms, -factor * advantages * 4.0 / t * share, weight), metrics

    return stateless(name, apply)


def geometric_mean(
    eps_low: float, eps_high: float, *, name: str = "geometric_mean"
) -> LossTransform:
    """loss_t = -factor_t A_t exp(mean over the trajectory of the clipped log r), its true gradient.

    log r is clipped to at most `eps_high` where A > 0 and at least -`eps_low` where A < 0: the
    bounds are of the logarithm. A dropped token adds 0 to the mean and still counts in it. The
    weight is that of a trajectory with one advantage, its terms weighed alike: where A changes its
    sign inside, the token's own A has another slope. NAME/high and NAME/low are the shares that are
    clipped. Source: GMPO (arXiv 2507.20673).
    """
    positive(name, "eps_low", eps_low)
    positive(name, "eps_high", eps_high)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor, log_ratio = _detached_factor(terms), jnp.where(terms.kept, terms.log_ratio, 0.0)
        advantages = jax.lax.stop_gradient(terms.advantages)
        high = (advantages > 0) & (log_ratio > eps_high)
        low = (advantages < 0) & (log_ratio < -eps_low)
        bounded = jnp.where(high, eps_high, jnp.where(low, -eps_low, log_ratio))
        ratio = jnp.exp(segment_mean(bounded, scores.mask, scores.segments))
        flows = terms.kept & _flows(log_ratio) & ~high & ~low
        # A token moves the terms of all its trajectory's kept tokens, each by 1 / count.
        count = jnp.maximum(segment_count(scores.mask, scores.segments), 1.0)
        reach = segment_sum(factor, scores.segments) / count
        weight = jnp.where(flows, jax.lax.stop_gradient(ratio) * reach, 0.0)
        metrics = {
            f"{name}/high": Mean.of(high.astype(jnp.float32), sampled(scores)),
            f"{name}/low": Mean.of(low.astype(jnp.float32), sampled(scores)),
        }
        return _added(terms, -factor * ratio * advantages, weight), metrics

    return stateless(name, apply)


def squared_sequence(tau: float, *, name: str = "squared_sequence") -> LossTransform:
    """loss_t = factor_t (A_t - tau S)^2, S the sum of log r over the trajectory, at each token.

    Under sequence_mean_token_mean that is mean_i (r_i - mean r - tau log(pi(y_i)/pi_old(y_i)))^2 of
    Kimi K1.5 (arXiv 2501.12599) eq. 3, with the gradient through the whole sum: 2 tau times that of
    their update. A dropped token has no term and is left out of S. NAME/residual_squared is the
    mean of the square.
    """
    positive(name, "tau", tau)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor, log_ratio = _detached_factor(terms), jnp.where(terms.kept, terms.log_ratio, 0.0)
        advantages = jax.lax.stop_gradient(terms.advantages)
        total = segment_sum(log_ratio, scores.segments)
        squared = jnp.where(terms.kept, jnp.square(advantages - tau * total), 0.0)
        weight = 2.0 * tau * factor * segment_count(terms.kept, scores.segments)
        metrics = {
            f"{name}/residual_squared": Mean.of(jax.lax.stop_gradient(squared), sampled(scores))
        }
        return _added(terms, factor * squared, weight), metrics

    return stateless(name, apply)


def value_loss(*, name: str = "value_loss") -> LossTransform:
    """loss_t = factor_t (V_t - return_t)^2 / 2: the critic's regression.

    NAME/returns, NAME/error (return - V) and NAME/..._squared are the moments that explained
    variance is made of, over the kept tokens.
    """

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        value = jnp.where(terms.kept, scores.score(VALUE, name), 0.0)
        wanted = jnp.where(terms.kept, scores.returns, 0.0)
        loss = 0.5 * _detached_factor(terms) * jnp.square(value - wanted)
        kept, metrics = terms.kept.astype(jnp.float32), {}
        error = jax.lax.stop_gradient(wanted - value)
        for what, each in (("returns", wanted), ("error", error)):
            metrics[f"{name}/{what}"] = Mean.of(each, kept)
            metrics[f"{name}/{what}_squared"] = Mean.of(jnp.square(each), kept)
        return terms._replace(loss=terms.loss + loss), metrics

    return stateless(name, apply, (VALUE,))


def cross_entropy(*, name: str = "ce") -> LossTransform:
    """loss_t = -factor_t log pi_current(a_t): supervised learning on the masked tokens."""

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        factor, nats = _detached_factor(terms), -jnp.where(terms.kept, scores.current, 0.0)
        known = jax.lax.stop_gradient(scores.current)
        metrics = {f"{name}/nats": Mean.of(-known, sampled(scores))}
        return _added(terms, factor * nats, factor), metrics

    return stateless(name, apply)


def _detached_factor(terms: Terms) -> Float[Array, "R L"]:
    return jax.lax.stop_gradient(jnp.where(terms.kept, terms.factor, 0.0))


def _flows(log_ratio: Float[Array, "R L"]) -> Array:
    """Where a ratio is not cut, so that it has a gradient."""
    return jnp.abs(log_ratio) < LOG_RATIO_BOUND


def _added(terms: Terms, loss: Float[Array, "R L"], weight: Float[Array, "R L"]) -> Terms:
    return terms._replace(loss=terms.loss + loss, weight=terms.weight + weight)
