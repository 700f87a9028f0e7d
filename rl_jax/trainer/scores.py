"""[P] Scores of given tokens without ever holding [tokens, vocabulary]."""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import AnyArray, Array, Tree
from rl_jax.losses.types import ENTROPY, VALUE, Scores, teacher
from rl_jax.masking import align_to_predicted, next_token
from rl_jax.model import Model
from rl_jax.trainer.anchors import anchors, teachers
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.log_softmax import Scored, chunked_scores
from rl_jax.trainer.routing import Routed, tally
from rl_jax.trainer.state import CRITIC, POLICY


def policy_scores(
    model: Model,
    params: Mapping[str, Tree],
    part: Batch,
    needs: Collection[str],
    *,
    vocab_chunk: int,
    replay: bool = False,
) -> tuple[Scores, Routed | None]:
    """What a loss of the policy sees of a microbatch: of the menu, what it `needs`; and what the
    policy's router did, where it has one.

    Entropy comes with the current log-probabilities. A tree that a score is taken under is in
    `params` by the score's name, the critic for values; a ValueError names the one that is lacking.
    With `replay` tokens go to the experts that the sampler chose, under every tree that descends
    from the policy, so under all but the teachers' and the critic's.
    """
    arrays = part.tokens, part.positions, part.segment_ids, part.temperature
    choices = part.choices if replay else None
    entropy = ENTROPY in needs
    scored, own = routed_scores(
        model, params[POLICY], *arrays, vocab_chunk=vocab_chunk, entropy=entropy, choices=choices
    )
    others = {} if scored.entropy is None else {ENTROPY: scored.entropy}
    foreign = {teacher(name) for name in teachers(needs)}
    for name in anchors(needs):
        tree, used = _tree(params, name, name), None if name in foreign else choices
        others[name] = token_logprobs(model, tree, *arrays, vocab_chunk=vocab_chunk, choices=used)
    if VALUE in needs:
        others[VALUE] = token_values(model, _tree(params, CRITIC, VALUE), part)
    routed = tally(model.routing, own, part) if model.routing and own is not None else None
    return scores_of_batch(part, scored.logprobs, others), routed


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


def token_logprobs(
    model: Model,
    params: Tree,
    tokens: Int[AnyArray, "R L"],
    positions: Int[AnyArray, "R L"],
    segment_ids: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    *,
    vocab_chunk: int,
    choices: Int[AnyArray, "R L M k"] | None = None,
) -> Float[Array, "R L"]:
    """log p(token t | tokens before t of its segment) in float32, at position t.

    Logits are divided by the predicted token's `temperature`. A chunk of the
    vocabulary has at most `vocab_chunk` rows. Column 0 and the first token of every segment hold
    meaningless numbers that masks must hide.
    `choices` are of experts to use instead of the router's own, -1 for a token's own.
    """
    arrays = tokens, positions, segment_ids, temperature
    return token_scores(model, params, *arrays, vocab_chunk=vocab_chunk, choices=choices).logprobs


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
    choices: Int[AnyArray, "R L M k"] | None = None,
) -> Scored:
    """`token_logprobs`, and with `entropy` that of p(. | tokens before t) at position t."""
    arrays = tokens, positions, segment_ids, temperature
    how = {"vocab_chunk": vocab_chunk, "entropy": entropy, "choices": choices}
    return routed_scores(model, params, *arrays, **how)[0]


def routed_scores(
    model: Model,
    params: Tree,
    tokens: Int[AnyArray, "R L"],
    positions: Int[AnyArray, "R L"],
    segment_ids: Int[AnyArray, "R L"],
    temperature: Float[AnyArray, "R L"],
    *,
    vocab_chunk: int,
    entropy: bool,
    choices: Int[AnyArray, "R L M k"] | None,
) -> tuple[Scored, Int[Array, "R L M k"] | None]:
    """`token_scores` and the router's own choices; None for a model without experts."""
    own = None
    if model.routing is None:
        hidden = model.forward(params, tokens, positions, segment_ids)
    else:
        given = None if choices is None else jnp.asarray(choices).astype(jnp.int32)
        hidden, own = model.routing.forward(params, tokens, positions, segment_ids, given)
    heat = next_token_temperature(temperature)
    scored = chunked_scores(
        model, params, hidden, next_token(tokens), heat, vocab_chunk, entropy=entropy
    )
    return jax.tree.map(align_to_predicted, scored), own


def next_token_temperature(temperature: Float[AnyArray, "R L"]) -> Float[Array, "R L"]:
    """The temperature of the token that each position predicts."""
    return jnp.roll(temperature, -1, axis=1)


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
    choices: Int[AnyArray, "R L M k"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """(largest |behavior - log p| over `fresh` tokens, their number) under `params`."""
    arrays = tokens, positions, segment_ids, temperature
    scores = token_logprobs(model, params, *arrays, vocab_chunk=vocab_chunk, choices=choices)
    gap = jnp.where(fresh, jnp.abs(scores - behavior), 0.0)
    return gap.max(), jnp.sum(fresh)
