"""[P] Kimi delta attention in plain XLA: groups of chunks of 64 tokens, forward and backward.

A scan goes from group to group, so what a group needs for a moment is the same for any length. The
backward pass keeps the inputs, the state that enters each chunk and the inverse in it; the rest of
a group is computed again, from the last group to the first. What a chunk gives depends on its
inputs and the entering state alone.

Everything is computed in float32, for bfloat16 operands too: with rounded products the errors of
slow decays add up over chunks (README.md).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda.chunk import (
    aged,
    along,
    assemble,
    blocks,
    decays,
    factors,
    merge,
    product,
    product_by_rows,
    scores,
    solve,
    turned,
    unit_lower_inverse,
    unstacked,
)

MATRICES = 64
"""So many chunks, counted per row and head, make a group: a tensor of it stays in a CPU's cache."""
MATRICES_UNBOUNDED = 8
"""The same where decays have no bound: a diagonal block then takes 16 times the memory."""


class Tokens(NamedTuple):
    """What enters, [R, L, ...]; padding tokens have k = v = g = beta = 0."""

    q: Float[Array, "R L H K"]
    k: Float[Array, "R L H K"]
    v: Float[Array, "R L H V"]
    g: Float[Array, "R L H K"]
    beta: Float[Array, "R L H"]


def _to_chunks(x: Array, dtype: DTypeLike) -> Array:
    """[R, L, H, K] -> [L / 64, R, H, C, K].

    The barrier keeps XLA's CPU backend from fusing arithmetic into a strided copy.
    """
    rows, length, heads, width = x.shape
    x = x.reshape(rows, length // CHUNK, CHUNK, heads, width).transpose(1, 0, 3, 2, 4)
    return jax.lax.optimization_barrier(x.astype(dtype))


def _from_chunks(x: Array) -> Array:
    chunks, rows, heads, _, width = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(rows, chunks * CHUNK, heads, width)


class Steps(NamedTuple):
    """What takes a state through chunks, [N, R, H, ...]: S' = keep S + keys^T (write - read S)."""

    read: Float[Array, "N R H C K"]
    write: Float[Array, "N R H C V"]
    keys: Float[Array, "N R H C K"]
    keep: Float[Array, "N R H K"]


def _zeroed(state: Array, reset: Bool[Array, " R"]) -> Array:
    return jnp.where(reset[:, None, None, None], 0.0, state)


class Visited(NamedTuple):
    """What a state leaves behind on its way; `after` only where it is asked for."""

    entering: Float[Array, "N R H K V"]
    """The state a chunk begins with."""
    updates: Float[Array, "N R H C V"]
    """write - read S."""
    final: Float[Array, "R H K V"]
    after: Float[Array, "N R H K V"] | None
    """The state a chunk ends with."""


def _visit(steps: Steps, state: Array, reset: Array, export: bool) -> Visited:
    """The state through all chunks, one after the other."""

    def step(state, chunk):
        reset, (read, write, keys, keep) = chunk
        state = _zeroed(state, reset)
        update = write - product(read, state)
        after = keep[..., None] * state + product(keys, update)
        return after, (state, update, after if export else None)

    chunks = (reset.T, steps._replace(keys=turned(steps.keys)))
    final, (entering, updates, after) = jax.lax.scan(step, state, chunks)
    return Visited(entering, updates, final, after)


def _visit_back(
    steps: Steps, reset: Array, entering: Array, updates: Array, cotangent: Visited
) -> tuple[Steps, Array]:
    """Slopes of `_visit` in the steps and the state it began with.

    Only the state's cotangent goes from chunk to chunk; the rest follows for all at once.
    """
    exported = cotangent.after is not None

    def step(d_after, chunk):
        reset, (read, _, keys, keep), d_entering, d_update, d_exported = chunk
        d_after = d_after + d_exported if exported else d_after
        d_update = d_update + product(keys, d_after)
        d_state = keep[..., None] * d_after + d_entering - product(read, d_update)
        return _zeroed(d_state, reset), (d_update, d_after)

    turned_read = steps._replace(read=turned(steps.read))
    chunks = (reset.T, turned_read, cotangent.entering, cotangent.updates, cotangent.after)
    d_state, (d_updates, d_after) = jax.lax.scan(step, cotangent.final, chunks, reverse=True)
    d_steps = Steps(
        read=-product_by_rows(d_updates, entering),
        write=d_updates,
        keys=product_by_rows(updates, d_after),
        keep=jnp.sum(entering * d_after, -1),
    )
    return d_steps, d_state


class Prepared(NamedTuple):
    """What chunks are, whatever state enters."""

    causal: Float[Array, "N R H C C"]
    entered: Float[Array, "N R H C K"]
    """q aged by the decays from the chunk's start up to the row."""
    steps: Steps


def _prepared(
    tokens: Tokens, bounded: bool, inverse: Array | None = None
) -> tuple[Prepared, Float[Array, "N R H C C"]]:
    """A few chunks, and the inverse in them if it is not known yet."""
    width = tokens.q.shape[-1]
    parts = tokens._replace(beta=tokens.beta[..., None])
    q, k, v, g, beta = (_to_chunks(x, tokens.g.dtype) for x in parts)
    g = blocks(g)
    sums = decays(g, bounded)
    rows = jnp.stack([blocks(q * width**-0.5), blocks(k * beta)], -3)
    chunk = factors(rows, blocks(k), sums)
    causal, lower = scores(chunk, g, sums)
    if inverse is None:
        inverse = unit_lower_inverse(lower)
    entered = aged(chunk.rows_aged, along(along(sums.before, -2), -2))
    q_entered, k_entered = (merge(x, -3, -2) for x in unstacked(entered))
    read, write = solve(inverse, lower, k_entered, v * beta)
    keys = merge(aged(chunk.keys_aged, along(sums.after, -2)), -3, -2)
    keep = aged(jnp.ones_like(sums.whole.log), sums.whole)[..., 0, :]
    return Prepared(assemble(causal), q_entered, Steps(read, write, keys, keep)), inverse


def _outputs(causal: Array, entered: Array, entering: Array, updates: Array) -> Array:
    """[R, L, H, V]."""
    return _from_chunks(product(entered, entering) + product(causal, updates))


class Kept(NamedTuple):
    """What the backward pass needs of chunks besides their inputs."""

    entering: Float[Array, "N R H K V"]
    inverse: Float[Array, "N R H C C"]


def _group(
    tokens: Tokens, state: Array, reset: Array, bounded: bool, export: bool
) -> tuple[Float[Array, "R L H V"], Visited, Kept]:
    """Outputs of a few chunks and the state's way through them.

    Equations: arXiv 2510.26692, sec. 3.
    """
    (causal, entered, steps), inverse = _prepared(tokens, bounded)
    visited = _visit(steps, state, reset, export)
    out = _outputs(causal, entered, visited.entering, visited.updates)
    return out.astype(tokens.v.dtype), visited, Kept(visited.entering, inverse)


def _group_back(
    tokens: Tokens,
    reset: Array,
    kept: Kept,
    cotangents: tuple[Array, Array, Array | None],
    bounded: bool,
) -> tuple[Tokens, Array]:
    """Slopes of `_group` in its tokens and the state that enters it."""
    d_out, d_final, d_after = cotangents
    entering, inverse = kept
    prepared, pull = jax.vjp(lambda tokens: _prepared(tokens, bounded, inverse)[0], tokens)
    causal, entered, steps = prepared
    updates = steps.write - product(steps.read, entering)
    _, pull_outputs = jax.vjp(_outputs, causal, entered, entering, updates)
    d_causal, d_entered, d_entering, d_updates = pull_outputs(d_out.astype(tokens.g.dtype))
    d_visited = Visited(d_entering, d_updates, d_final, d_after)
    d_steps, d_state = _visit_back(steps, reset, entering, updates, d_visited)
    (d_tokens,) = pull(Prepared(d_causal, d_entered, d_steps))
    return d_tokens, d_state


def _cut(x: Array, index: Array, length: int) -> Array:
    """Part `index` of `length` of axis 1."""
    return jax.lax.dynamic_slice_in_dim(x, index * length, length, 1)


def _joined(parts: Array) -> Array:
    """[groups, R, n, ...] -> [R, groups * n, ...]."""
    parts = jnp.moveaxis(parts, 0, 1)
    return parts.reshape(parts.shape[0], -1, *parts.shape[3:])


def _run(tokens, state, reset, size, bounded, export):
    return _groups(tokens, state, reset, size, bounded, export, False)[0]


def _forward(tokens, state, reset, size, bounded, export):
    results, kept = _groups(tokens, state, reset, size, bounded, export, True)
    return results, (tokens, reset, kept)


def _groups(tokens, state, reset, size, bounded, export, keep):
    """Group after group of `size` chunks; also what the backward pass keeps."""

    def step(state, index):
        here = jax.tree.map(lambda x: _cut(x, index, size * CHUNK), tokens)
        out, visited, kept = _group(here, state, _cut(reset, index, size), bounded, export)
        return visited.final, (out, visited.after, kept if keep else None)

    groups = reset.shape[1] // size
    final, (out, after, kept) = jax.lax.scan(step, state, jnp.arange(groups))
    states = None if after is None else after.reshape(-1, *after.shape[2:])
    return (_joined(out), final, states), kept


def _backward(size, bounded, export, saved, cotangents):
    tokens, reset, kept = saved
    d_out, d_final, d_states = cotangents
    groups = reset.shape[1] // size
    if export:
        d_states = d_states.reshape(groups, size, *d_states.shape[1:])

    def step(d_final, group):
        index, kept, d_after = group
        here, d_here = jax.tree.map(lambda x: _cut(x, index, size * CHUNK), (tokens, d_out))
        d_tokens, d_state = _group_back(
            here, _cut(reset, index, size), kept, (d_here, d_final, d_after), bounded
        )
        return d_state, d_tokens

    d_state, d_tokens = jax.lax.scan(
        step, d_final, (jnp.arange(groups), kept, d_states), reverse=True
    )
    return jax.tree.map(_joined, d_tokens), d_state, None


_grouped = jax.custom_vjp(_run, nondiff_argnums=(3, 4, 5))
_grouped.defvjp(_forward, _backward)


def group_size(chunks: int, rows_and_heads: int, bounded: bool) -> int:
    """Chunks per group, so that groups are equal and few chunks are added."""
    most = (MATRICES if bounded else MATRICES_UNBOUNDED) // rows_and_heads
    groups = -(-chunks // max(1, most))
    return -(-chunks // groups)


def obstacle(key_width: int, value_width: int, dtype: DTypeLike) -> str:
    """Nothing: any width, either dtype, any gate, any device."""
    del key_width, value_width, dtype
    return ""


def chunked(
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H K"],
    beta: Float[Array, "R L H"],
    state: Float[Array, "R H K V"],
    reset: Bool[Array, "R N"],
    *,
    bounded: bool,
    export: bool,
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"], Float[Array, "N R H K V"] | None]:
    """Outputs, final state and, if `export`, the states after every chunk; see `api.chunked`."""
    chunks = reset.shape[1]
    size = group_size(chunks, q.shape[0] * q.shape[2], bounded)
    extra = -chunks % size
    tokens = Tokens(q, k, v, g, beta)
    if extra:
        tokens = jax.tree.map(lambda x: _lengthened(x, extra * CHUNK), tokens)
        reset = _lengthened(reset, extra)
    out, final, states = _grouped(tokens, state, reset, size, bounded, export)
    return out[:, : chunks * CHUNK], final, states[:chunks] if export else None


def _lengthened(x: Array, extra: int) -> Array:
    """Zeros at the end of axis 1: tokens that neither decay nor write the state."""
    return jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2))
