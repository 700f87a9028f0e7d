"""[P] One uniform, one token: the CDF inverted in float32 in vocabulary order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt


class Sampled(NamedTuple):
    tokens: Int[Array, " R"]
    logprobs: Float[Array, " R"]
    """Under the distribution really sampled from (the recorded behavior log-probability)."""
    raw_logprobs: Float[Array, " R"]
    """Under temperature 1."""
    finite: Bool[Array, " R"]
    """False where the row's logits were not finite; its token means nothing."""
    choices: UInt[Array, "R n M k"] | None = None
    """Experts that the step's tokens went to, where they are recorded; garbage beyond n_valid."""


def sample(
    logits: Float[Array, "R V"], temperature: Float[Array, " R"], uniforms: Float[Array, " R"]
) -> Sampled:
    """Draws by inversion: the first token that the cumulative probability passes the uniform at.

    Temperature 0 is greedy (first maximum) and reports the log-probability under temperature 1.
    """
    greedy = temperature <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    drawn = _invert(jnp.exp(logprobs), uniforms[:, None])
    tokens = jnp.where(greedy, _first(logits == logits.max(-1, keepdims=True)), drawn)

    def pick(table: Array) -> Array:
        return jnp.take_along_axis(table, tokens[:, None], axis=-1)[:, 0]

    raw = pick(jax.nn.log_softmax(logits, axis=-1))
    return Sampled(tokens, pick(logprobs), raw, jnp.isfinite(logits).all(axis=-1))


def _invert(probabilities: Float[Array, "R V"], uniforms: Float[Array, "R 1"]) -> Int[Array, " R"]:
    """The prefix sum runs as a tree, so it may fall or rise by a rounding error where a probability
    is 0: such a token is passed over, and the last possible one answers where none exceeds."""
    cumulative = jnp.cumsum(probabilities, axis=-1)
    possible = probabilities > 0
    beyond = possible & (cumulative > uniforms * cumulative[:, -1:])
    count = probabilities.shape[-1]
    last = count - 1 - _first(possible[:, ::-1])
    return jnp.where(beyond.any(axis=-1), _first(beyond), last)


def _first(found: Bool[Array, "R V"]) -> Int[Array, " R"]:
    """Where a row is true first, its last place where nowhere. XLA's own argmax goes through a row
    number by number."""
    count = found.shape[-1]
    places = jnp.where(found, jnp.arange(count, dtype=jnp.int32), count - 1)
    return places.min(axis=-1)
