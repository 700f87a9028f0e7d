"""[P] One uniform, one token: the CDF inverted in float32 in vocabulary order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Sampled(NamedTuple):
    tokens: Int[Array, " R"]
    logprobs: Float[Array, " R"]
    """Under the distribution really sampled from (the recorded behavior log-probability)."""
    raw_logprobs: Float[Array, " R"]
    """Under temperature 1."""
    finite: Bool[Array, " R"]
    """False where the row's logits were not finite; its token means nothing."""


def sample(
    logits: Float[Array, "R V"], temperature: Float[Array, " R"], uniforms: Float[Array, " R"]
) -> Sampled:
    """Draws by inversion: the first token whose cumulative probability exceeds the uniform.

    Temperature 0 is greedy (first maximum) and reports the log-probability under temperature 1.
    """
    greedy = temperature <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    cumulative = jnp.cumsum(jnp.exp(logprobs), axis=-1)
    drawn = jnp.sum(cumulative <= uniforms[:, None] * cumulative[:, -1:], axis=-1)
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
    tokens = jnp.minimum(tokens, logits.shape[-1] - 1).astype(jnp.int32)

    def pick(table: Array) -> Array:
        return jnp.take_along_axis(table, tokens[:, None], axis=-1)[:, 0]

    raw = pick(jax.nn.log_softmax(logits, axis=-1))
    return Sampled(tokens, pick(logprobs), raw, jnp.isfinite(logits).all(axis=-1))
