"""[P] Log-probabilities of given tokens without ever holding [tokens, vocabulary]."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import AnyArray, Array, Tree
from rl_jax.masking import align_to_predicted, next_token
from rl_jax.model import Model


def token_logprobs(
    model: Model,
    params: Tree,
    tokens: Int[AnyArray, "R L"],
    positions: Int[AnyArray, "R L"],
    segment_ids: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    *,
    vocab_chunk: int,
) -> Float[Array, "R L"]:
    """log p(token t | tokens before t of its segment) in float32, at position t.

    Logits are divided by the predicted token's `temperature`. `vocab_chunk` divides the vocabulary.
    Column 0 and the first token of every segment hold meaningless numbers that masks must hide.
    """
    hidden = model.forward(params, tokens, positions, segment_ids)
    scores = chunked_logprobs(
        model, params, hidden, next_token(tokens), next_token_temperature(temperature), vocab_chunk
    )
    return align_to_predicted(scores)


def next_token_temperature(temperature: Float[AnyArray, "R L"]) -> Float[Array, "R L"]:
    """The temperature of the token that each position predicts."""
    return jnp.roll(temperature, -1, axis=1)


def chunked_logprobs(
    model: Model,
    params: Tree,
    hidden: Float[Array, "R L D"],
    targets: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    vocab_chunk: int,
) -> Float[Array, "R L"]:
    """Log-softmax at `targets`, the vocabulary taken in chunks with a running log-sum-exp."""
    if model.vocab_size % vocab_chunk:
        raise ValueError(f"vocab_chunk {vocab_chunk} does not divide {model.vocab_size}")

    @jax.checkpoint
    def chunk(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        lse, picked = carry
        logits = model.head(params, hidden, start, vocab_chunk) / temperature[..., None]
        lse = jnp.logaddexp(lse, jax.nn.logsumexp(logits, axis=-1))
        inside = (targets >= start) & (targets < start + vocab_chunk)
        index = jnp.clip(targets - start, 0, vocab_chunk - 1)
        value = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
        return (lse, jnp.where(inside, value, picked)), None

    start = (jnp.full(targets.shape, -jnp.inf, jnp.float32), jnp.zeros(targets.shape, jnp.float32))
    starts = jnp.arange(0, model.vocab_size, vocab_chunk)
    if len(starts) == 1:
        (lse, picked), _ = chunk(start, starts[0])
    else:
        (lse, picked), _ = jax.lax.scan(chunk, start, starts)
    return picked - lse


def audit(
    model: Model,
    params: Tree,
    tokens: Int[AnyArray, "R L"],
    positions: Int[AnyArray, "R L"],
    segment_ids: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    behavior: Float[AnyArray, "R L"],
    fresh: Bool[AnyArray, "R L"],
    *,
    vocab_chunk: int,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """(largest |behavior - log p| over `fresh` tokens, their number) under `params`."""
    scores = token_logprobs(
        model, params, tokens, positions, segment_ids, temperature, vocab_chunk=vocab_chunk
    )
    gap = jnp.where(fresh, jnp.abs(scores - behavior), 0.0)
    return gap.max(), jnp.sum(fresh)
