"""[P] Scores of given tokens without ever holding [tokens, vocabulary]."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import AnyArray, Array, Tree
from rl_jax.losses.types import ENTROPY, VALUE, Scores
from rl_jax.masking import align_to_predicted, next_token
from rl_jax.model import Model
from rl_jax.trainer.anchors import anchors
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.state import CRITIC, POLICY


def policy_scores(
    model: Model,
    params: Mapping[str, Tree],
    part: Batch,
    needs: Collection[str],
    *,
    vocab_chunk: int,
) -> Scores:
    """What a loss of the policy sees of a microbatch: of the menu, what it `needs`.

    Entropy comes with the current log-probabilities. A tree that a score is taken under is in
    `params` by the score's name, the critic for values; a ValueError names the one that is lacking.
    """
    arrays = part.tokens, part.positions, part.segment_ids, part.temperature
    scored = token_scores(
        model, params[POLICY], *arrays, vocab_chunk=vocab_chunk, entropy=ENTROPY in needs
    )
    others = {} if scored.entropy is None else {ENTROPY: scored.entropy}
    for name in anchors(needs):
        tree = _tree(params, name, name)
        others[name] = token_logprobs(model, tree, *arrays, vocab_chunk=vocab_chunk)
    if VALUE in needs:
        others[VALUE] = token_values(model, _tree(params, CRITIC, VALUE), part)
    return scores_of_batch(part, scored.logprobs, others)


def scores_of_batch(part: Batch, current: Array, others: Mapping[str, Array]) -> Scores:
    """`Scores` of a microbatch; what stands outside its mask is 0."""
    return Scores(
        current=jnp.where(part.mask, current, 0.0),
        behavior=jnp.asarray(part.behavior),
        mask=jnp.asarray(part.mask),
        advantages=jnp.asarray(part.advantages),
        lag=jnp.asarray(part.lag),
        segments=jnp.asarray(part.segment_ids),
        tasks=jnp.asarray(part.tasks),
        returns=jnp.asarray(part.returns),
        others={name: jnp.where(part.mask, values, 0.0) for name, values in others.items()},
    )


def token_values(model: Model, critic: Tree, part: Batch) -> Float[Array, "R L"]:
    """The critic's estimate before each token, at the token: from the hidden state at t - 1."""
    hidden = model.forward(critic["trunk"], part.tokens, part.positions, part.segment_ids)
    head = critic["head"]
    values = jnp.dot(hidden, head["weight"], preferred_element_type=jnp.float32) + head["bias"]
    return align_to_predicted(values)


def _tree(params: Mapping[str, Tree], name: str, score: str) -> Tree:
    if name not in params:
        there = ", ".join(sorted(params))
        raise ValueError(f"the loss needs the score {score!r}: no tree {name!r} among {there}")
    return params[name]


class Scored(NamedTuple):
    """What one pass over the vocabulary says of given tokens."""

    logprobs: Float[Array, "R L"]
    entropy: Float[Array, "R L"] | None
    """In nats, of the distribution that each token came from; None where nobody asked."""


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
    arrays = tokens, positions, segment_ids, temperature
    return token_scores(model, params, *arrays, vocab_chunk=vocab_chunk).logprobs


def token_scores(
    model: Model,
    params: Tree,
    tokens: Int[AnyArray, "R L"],
    positions: Int[AnyArray, "R L"],
    segment_ids: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    *,
    vocab_chunk: int,
    entropy: bool = False,
) -> Scored:
    """`token_logprobs`, and with `entropy` that of p(. | tokens before t) at position t."""
    hidden = model.forward(params, tokens, positions, segment_ids)
    heat = next_token_temperature(temperature)
    scored = chunked_scores(
        model, params, hidden, next_token(tokens), heat, vocab_chunk, entropy=entropy
    )
    return jax.tree.map(align_to_predicted, scored)


def next_token_temperature(temperature: Float[AnyArray, "R L"]) -> Float[Array, "R L"]:
    """The temperature of the token that each position predicts."""
    return jnp.roll(temperature, -1, axis=1)


_Carry = tuple[Array, Array, Array | None]
"""Of the chunks so far: log-sum-exp, logit of the target if it was there, entropy if asked for."""


def chunked_scores(
    model: Model,
    params: Tree,
    hidden: Float[Array, "R L D"],
    targets: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    vocab_chunk: int,
    *,
    entropy: bool = False,
) -> Scored:
    """Log-softmax at `targets`, the vocabulary taken in chunks with a running log-sum-exp."""
    if model.vocab_size % vocab_chunk:
        raise ValueError(f"vocab_chunk {vocab_chunk} does not divide {model.vocab_size}")

    @jax.checkpoint
    def chunk(carry: _Carry, start: Array) -> tuple[_Carry, None]:
        before, picked, mixed = carry
        logits = model.head(params, hidden, start, vocab_chunk) / temperature[..., None]
        own = jax.nn.logsumexp(logits, axis=-1)
        lse = jnp.logaddexp(before, own)
        if mixed is not None:
            shares = jnp.exp(before - lse), jnp.exp(own - lse)
            logp = logits - own[..., None]
            nats = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            mixed = shares[0] * mixed + shares[1] * nats + _entropy_of_two(before - own)
        inside = (targets >= start) & (targets < start + vocab_chunk)
        index = jnp.clip(targets - start, 0, vocab_chunk - 1)
        value = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
        return (lse, jnp.where(inside, value, picked), mixed), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = (jnp.full(targets.shape, -jnp.inf, jnp.float32), zeros, zeros if entropy else None)
    starts = jnp.arange(0, model.vocab_size, vocab_chunk)
    if len(starts) == 1:
        (lse, picked, mixed), _ = chunk(start, starts[0])
    else:
        (lse, picked, mixed), _ = jax.lax.scan(chunk, start, starts)
    return Scored(picked - lse, mixed)


def _entropy_of_two(log_odds: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """Nats of a choice between two whose probabilities have these log-odds; -inf: none."""
    some = jnp.isfinite(log_odds)
    safe = jnp.where(some, log_odds, 0.0)
    nats = jax.nn.softplus(safe) - safe * jax.nn.sigmoid(safe)
    return jnp.where(some, nats, 0.0)


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
