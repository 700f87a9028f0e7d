"""A transform of one's own: the band of DIS with soft edges. See write_a_transform.ipynb."""

import jax
import jax.numpy as jnp

from rl_jax import losses
from rl_jax.metrics.states import Mean


def soft_band(width: float) -> losses.LossTransform:
    """Multiplies the weight of a token by exp(-(log ratio / width)^2 / 2): no token is dropped."""

    def apply(scores: losses.Scores, terms: losses.Terms) -> tuple[losses.Terms, losses.Metrics]:
        log_ratio = jax.lax.stop_gradient(terms.log_ratio)
        soft = jnp.exp(-0.5 * jnp.square(log_ratio / width))
        metrics = {"soft_band/mean": Mean.of(soft, losses.sampled(scores))}
        return terms._replace(factor=terms.factor * soft), metrics

    return losses.stateless("soft_band", apply)


def soft_dis(width: float = 0.5) -> losses.Loss:
    """DIS with a soft band: -sg(soft d A) log p, mean over tokens."""
    parts = (losses.current_over_behavior(), soft_band(width), losses.weigh())
    return losses.Loss(losses.chain(*parts, losses.policy_gradient()), losses.token_mean)
