"""[P] A loss as a curve: how hard it pushes one token, by how far the policies are apart."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_jax.arrays import AnyArray
from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.types import ENTROPY, VALUE, LossTransform, Scores


def weight_curve(
    transform: LossTransform,
    log_ratios: Float[AnyArray, " n"],
    advantage: float,
    *,
    behavior: float = -4.0,
) -> Float[Array, " n"]:
    """-(d loss / d log p) / advantage of a trajectory of one token, per log-ratio to the sampler.

    The sampler gave the token the log-probability `behavior`, the current policy gives it that plus
    the log-ratio, and all other policies of the menu agree with the sampler: so whichever ratio to
    the current policy a part looks at, it sees this one. Lag, value, entropy and return are 0. Each
    point is a batch of its own: a mask that looks at the whole batch sees this token alone.
    """

    def loss(current: Float[Array, ""]) -> Float[Array, ""]:
        scores = _one_token(transform, current, behavior, advantage)
        return evaluate(transform, scores)[0].loss[0, 0]

    current = jnp.asarray(log_ratios, jnp.float32) + behavior
    return -jax.vmap(jax.grad(loss))(current) / advantage


def _one_token(
    transform: LossTransform, current: Float[Array, ""], behavior: float, advantage: float
) -> Scores:
    def like(value: float) -> Float[Array, "1 1"]:
        return jnp.full((1, 1), value, jnp.float32)

    zero = jnp.zeros((1, 1), jnp.int32)
    return Scores(
        current=current.reshape(1, 1),
        behavior=like(behavior),
        mask=jnp.ones((1, 1), jnp.bool_),
        advantages=like(advantage),
        lag=zero,
        segments=zero,
        tasks=zero,
        returns=like(0.0),
        others={
            name: like(0.0 if name in (ENTROPY, VALUE) else behavior) for name in transform.needs
        },
    )
