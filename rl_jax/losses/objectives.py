"""[P] Surrogates: where the gradient enters a chain."""

import jax
import jax.numpy as jnp

from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, stateless
from rl_jax.metrics.states import Mean


def policy_gradient() -> LossTransform:
    """loss_t = -sg(factor_t A_t) log pi_current(a_t): the score function with a fixed weight."""

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        weight = jax.lax.stop_gradient(terms.factor * scores.advantages)
        kept = scores.mask & (weight != 0)  # 0 x -inf would be nan
        loss = -weight * jnp.where(kept, scores.current, 0.0)
        sampled = scores.mask.astype(jnp.float32)
        metrics = {"policy/neg_logprob": Mean.of(-scores.current, sampled)}
        return terms._replace(loss=terms.loss + loss), metrics

    return stateless(apply)


def cross_entropy() -> LossTransform:
    """loss_t = -log pi_current(a_t): supervised learning on the masked tokens."""

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        loss = jnp.where(scores.mask, -scores.current, 0.0)
        metrics = {"ce/nats": Mean.of(loss, scores.mask.astype(jnp.float32))}
        return terms._replace(loss=terms.loss + loss), metrics

    return stateless(apply)
