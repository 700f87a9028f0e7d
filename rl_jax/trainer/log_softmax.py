"""[P] Log-softmax at given tokens, the vocabulary taken in chunks.

On a mesh every device takes its own tokens and its own part of the vocabulary. No more of a matrix
than a chunk is ever gathered, and no more than `LOGITS` logits are there at once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from rl_jax.arrays import AnyArray, Array, Tree
from rl_jax.model import Model
from rl_jax.sharding import CONTEXT, ROWS, SHARDS, TENSOR, degree, on_each_device, param_specs


class Scored(NamedTuple):
    """What one pass over the vocabulary says of given tokens."""

    logprobs: Float[Array, "R L"]
    entropy: Float[Array, "R L"] | None
    """In nats, of the distribution that each token came from; None where nobody asked."""


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
    """Log-softmax at `targets`, with a running log-sum-exp over chunks of the vocabulary.

    A chunk has at most `vocab_chunk` rows (`chunk_rows`). Over `tensor` each device has an equal
    part of the vocabulary, and of each chunk.
    """
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk {vocab_chunk}: needs at least 1")
    tokens = hidden, jnp.asarray(targets), jnp.asarray(temperature)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or mesh.size == 1:
        head = partial(model.head, params)
        chunk = chunk_rows(model.vocab_size, vocab_chunk)
        lse, picked, nats = _over_chunks(head, model.vocab_size, *tokens, chunk, entropy)
        return Scored(picked - lse, nats)
    return _on_mesh(model, params, tokens, vocab_chunk, entropy)


def chunk_rows(vocab_size: int, at_most: int, parts: int = 1) -> int:
    """Rows of the vocabulary that a device takes at once, of its 1 / `parts` of it.

    The largest divisor of its rows up to `at_most / parts`; where that is less than half of it,
    as for a vocabulary of 2^7 x 1187, as few chunks as there can be, of which the last overlaps.
    """
    own, limit = vocab_size // parts, max(at_most // parts, 1)
    divisor = max(n for n in range(1, min(own, limit) + 1) if own % n == 0)
    return divisor if 2 * divisor >= min(own, limit) else -(-own // -(-own // limit))


_Carry = tuple[Array, Array, Array | None]
"""Of the chunks so far: log-sum-exp, logit of the target if it was there, entropy if asked for."""
LOGITS = 2**26
"""Of a device at once, 256 MiB; where a chunk has more for all tokens, tokens go in blocks."""
_NOTHING = -1e30
"""Logit of a row that an earlier chunk had: no probability, and finite, so no 0 x inf."""
_Head = Callable[[Array, Array, int], Array]
"""`Model.head` of given parameters: (hidden, start, size) -> logits."""


def _over_chunks(
    head: _Head,
    vocab_size: int,
    hidden: Array,
    targets: Array,
    temperature: Array,
    vocab_chunk: int,
    entropy: bool,
) -> _Carry:
    """Of all tokens [R, L], in equal blocks of a row's tokens where they are too many at once."""

    def of(hidden: Array, targets: Array, temperature: Array) -> _Carry:
        tokens = hidden, targets, temperature
        return _of_tokens(head, vocab_size, *tokens, vocab_chunk, entropy)

    rows, length = targets.shape
    fits = max(LOGITS // (vocab_chunk * rows), 1)
    count = next(n for n in range(1, length + 1) if length % n == 0 and length // n <= fits)
    if count == 1:
        return of(hidden, targets, temperature)
    blocks = (
        jnp.swapaxes(x.reshape(rows, count, length // count, *x.shape[2:]), 0, 1)
        for x in (hidden, targets, temperature)
    )
    # Made again in the backward pass, or all chunks of the matrix, which blocks share, were kept.
    again = jax.checkpoint(lambda own: of(*own), prevent_cse=False)
    found = jax.lax.map(again, tuple(blocks))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(rows, length), found)


def _of_tokens(
    head: _Head,
    vocab_size: int,
    hidden: Array,
    targets: Array,
    temperature: Array,
    vocab_chunk: int,
    entropy: bool,
) -> _Carry:
    overlaps = vocab_size % vocab_chunk > 0

    @jax.checkpoint
    def chunk(carry: _Carry, begin: Array) -> tuple[_Carry, None]:
        before, picked, mixed = carry
        start = jnp.minimum(begin, vocab_size - vocab_chunk) if overlaps else begin
        logits = head(hidden, start, vocab_chunk) / temperature[..., None]
        if overlaps:
            logits = jnp.where(start + jnp.arange(vocab_chunk) < begin, _NOTHING, logits)
        own = jax.nn.logsumexp(logits, axis=-1)
        lse = jnp.logaddexp(before, own)
        if mixed is not None:
            shares = jnp.exp(before - lse), jnp.exp(own - lse)
            logp = logits - own[..., None]
            nats = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            mixed = shares[0] * mixed + shares[1] * nats + _entropy_of_two(before - own)
        inside = (targets >= begin) & (targets < start + vocab_chunk)
        index = jnp.clip(targets - start, 0, vocab_chunk - 1)
        value = jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]
        return (lse, jnp.where(inside, value, picked), mixed), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = (jnp.full(targets.shape, -jnp.inf, jnp.float32), zeros, zeros if entropy else None)
    starts = jnp.arange(0, vocab_size, vocab_chunk)
    if len(starts) == 1:
        return chunk(start, starts[0])[0]
    return jax.lax.scan(chunk, start, starts)[0]


def _entropy_of_two(log_odds: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """Nats of a choice between two whose probabilities have these log-odds; -inf: none."""
    some = jnp.isfinite(log_odds)
    safe = jnp.where(some, log_odds, 0.0)
    nats = jax.nn.softplus(safe) - safe * jax.nn.sigmoid(safe)
    return jnp.where(some, nats, 0.0)


def _on_mesh(
    model: Model,
    params: Tree,
    tokens: tuple[Array, Array, Array],
    vocab_chunk: int,
    entropy: bool,
) -> Scored:
    """Each device's tokens against its part of the vocabulary; parts are added up over `tensor`."""
    leaves, structure = jax.tree.flatten(params)
    names = structure.flatten_up_to(model.axes())
    specs = structure.flatten_up_to(param_specs(model.axes()))
    read = read_by_head(model, params, tokens[0])
    parts, shards = degree(TENSOR), degree(*SHARDS)
    own = model.vocab_size // parts
    chunk = chunk_rows(model.vocab_size, vocab_chunk, parts)

    def gathered(leaf: Array, axes: tuple[str | None, ...], start: Array) -> Array:
        if "vocab" in axes:
            leaf = jax.lax.dynamic_slice_in_dim(leaf, start, chunk, axes.index("vocab"))
        if "embed" in axes and shards > 1:
            leaf = jax.lax.all_gather(leaf, SHARDS, axis=axes.index("embed"), tiled=True)
        return leaf

    def local(hidden: Array, targets: Array, temperature: Array, *given: Array):
        def head(hidden: Array, start: Array, size: int) -> Array:
            here: list[Array | None] = [None] * len(leaves)
            for i, leaf in zip(read, given, strict=True):
                here[i] = gathered(leaf, names[i], start)
            return model.head(structure.unflatten(here), hidden, jnp.int32(0), size)

        if parts > 1:
            targets = targets - jax.lax.axis_index(TENSOR) * own
        carry = _over_chunks(head, own, hidden, targets, temperature, chunk, entropy)
        lse, picked, nats = _added_up(carry) if parts > 1 else carry
        return (picked - lse,) if nats is None else (picked - lse, nats)

    cut = PartitionSpec(ROWS, CONTEXT)
    cuts = dict.fromkeys(("hidden", "targets", "temperature"), cut)
    cuts |= {f"parameter {i}": specs[i] for i in read}
    run = on_each_device(local, cuts, (cut,) * (1 + entropy))
    logprobs, *nats = run(*tokens, *(leaves[i] for i in read))
    return Scored(logprobs, nats[0] if nats else None)


def read_by_head(model: Model, params: Tree, hidden: Array) -> tuple[int, ...]:
    """Which leaves of `params` the logits depend on: only those are handed over."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    hidden_shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)

    def head(params: Tree, hidden: Array) -> Array:
        return model.head(params, hidden, jnp.int32(0), model.vocab_size)

    jaxpr = jax.make_jaxpr(head)(shapes, hidden_shape).jaxpr
    used = {id(variable) for variable in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if any(id(variable) in used for variable in equation.outvars):
            used |= {id(variable) for variable in equation.invars}
    given = jaxpr.invars[: len(jax.tree.leaves(params))]
    return tuple(i for i, variable in enumerate(given) if id(variable) in used)


def _added_up(carry: _Carry) -> _Carry:
    """Of the whole vocabulary, from what each device of `tensor` has of its part."""
    own, picked, nats = carry
    peak = jax.lax.pmax(jax.lax.stop_gradient(own), TENSOR)
    lse = peak + jnp.log(jax.lax.psum(jnp.exp(own - peak), TENSOR))
    if nats is not None:
        share = jnp.exp(own - lse)
        nats = jax.lax.psum(share * (nats - (own - lse)), TENSOR)
    return lse, jax.lax.psum(picked, TENSOR), nats
