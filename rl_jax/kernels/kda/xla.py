"""[P] Kimi delta attention in plain XLA: groups of chunks of 64 tokens, forward and backward.

A scan goes from group to group, so what a group needs for a moment is the same for any length. The
backward pass keeps the inputs and the state that enters each group, and goes through the groups
from the last to the first, each computed again. What a chunk gives depends on its inputs and the
entering state alone.

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
    assemble,
    blocks,
    contract,
    decays,
    factors,
    merge,
    scores,
    unit_lower_inverse,
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
    return _visited(steps, state, reset, export)


def _visit_plainly(steps, state, reset, export):

    def step(state, chunk):
        reset, (read, write, keys, keep) = chunk
        state = _zeroed(state, reset)
        update = write - contract(read, state, -1, -2)
        after = keep[..., None] * state + contract(keys, update, -2, -2)
        return after, (state, update, after if export else None)

    final, (entering, updates, after) = jax.lax.scan(step, state, (reset.T, steps))
    return Visited(entering, updates, final, after)


def _visit_forward(steps, state, reset, export):
    visited = _visit_plainly(steps, state, reset, export)
    return visited, (steps, reset, visited.entering, visited.updates)


def _visit_backward(export, saved, cotangent):
    """Only the state's cotangent goes from chunk to chunk; the rest follows for all at once."""
    steps, reset, entering, updates = saved

    def step(d_after, chunk):
        reset, (read, _, keys, keep), d_entering, d_update, d_exported = chunk
        d_after = d_after + d_exported if export else d_after
        d_update = d_update + contract(keys, d_after, -1, -2)
        d_state = keep[..., None] * d_after + d_entering
        d_state = d_state - contract(read, d_update, -2, -2)
        return _zeroed(d_state, reset), (d_update, d_after)

    chunks = (reset.T, steps, cotangent.entering, cotangent.updates, cotangent.after)
    d_state, (d_updates, d_after) = jax.lax.scan(step, cotangent.final, chunks, reverse=True)
    d_steps = Steps(
        read=-contract(d_updates, entering, -1, -1),
        write=d_updates,
        keys=contract(updates, d_after, -1, -1),
        keep=jnp.sum(entering * d_after, -1),
    )
    return d_steps, d_state, None


_visited = jax.custom_vjp(_visit_plainly, nondiff_argnums=(3,))
_visited.defvjp(_visit_forward, _visit_backward)


def _group(
    tokens: Tokens, state: Array, reset: Array, bounded: bool, export: bool
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"], Float[Array, "N R H K V"] | None]:
    """Outputs and final state of a few chunks and, if `export`, the state after each.

    Equations: arXiv 2510.26692, sec. 3.
    """
    width = tokens.q.shape[-1]
    parts = tokens._replace(beta=tokens.beta[..., None])
    q, k, v, g, beta = (_to_chunks(x, tokens.g.dtype) for x in parts)
    g = blocks(g)
    sums = decays(g)
    rows = jnp.stack([blocks(q * width**-0.5), blocks(k * beta)], -3)
    chunk = factors(rows, blocks(k), sums)
    causal, lower = scores(chunk, g, sums, bounded)
    entered = chunk.rows_aged * jnp.exp(sums.before)[..., None, None, :]
    q_entered, k_entered = (merge(entered[..., kind, :, :], -3, -2) for kind in (0, 1))
    wanted = jnp.concatenate([k_entered, v * beta], -1)
    read, write = jnp.split(contract(unit_lower_inverse(lower), wanted, -1, -2), [width], -1)
    keys = merge(chunk.keys_aged * jnp.exp(sums.after)[..., None, :], -3, -2)
    keep = jnp.exp(sums.before[..., -1, :] + sums.total[..., -1, :])
    steps = Steps(read, write, keys, keep)
    visited = _visit(steps, state, reset, export)
    out = contract(q_entered, visited.entering, -1, -2)
    out = out + contract(assemble(causal), visited.updates, -1, -2)
    return _from_chunks(out.astype(tokens.v.dtype)), visited.final, visited.after


def _cut(x: Array, index: Array, length: int) -> Array:
    """Part `index` of `length` of axis 1."""
    return jax.lax.dynamic_slice_in_dim(x, index * length, length, 1)


def _joined(parts: Array) -> Array:
    """[groups, R, n, ...] -> [R, groups * n, ...]."""
    parts = jnp.moveaxis(parts, 0, 1)
    return parts.reshape(parts.shape[0], -1, *parts.shape[3:])


def _run(tokens, state, reset, size, bounded, export):
    return _forward(tokens, state, reset, size, bounded, export)[0]


def _forward(tokens, state, reset, size, bounded, export):
    """Group after group of `size` chunks; also what the backward pass keeps."""

    def step(state, index):
        here = jax.tree.map(lambda x: _cut(x, index, size * CHUNK), tokens)
        out, final, after = _group(here, state, _cut(reset, index, size), bounded, export)
        return final, (out, state, after)

    groups = reset.shape[1] // size
    final, (out, entering, after) = jax.lax.scan(step, state, jnp.arange(groups))
    states = None if after is None else after.reshape(-1, *after.shape[2:])
    return (_joined(out), final, states), (tokens, reset, entering)


def _backward(size, bounded, export, saved, cotangents):
    tokens, reset, entering = saved
    d_out, d_final, d_states = cotangents
    groups = reset.shape[1] // size
    if export:
        d_states = d_states.reshape(groups, size, *d_states.shape[1:])

    def step(d_final, group):
        index, state, d_after = group
        here = jax.tree.map(lambda x: _cut(x, index, size * CHUNK), tokens)
        flags = _cut(reset, index, size)
        _, pull = jax.vjp(lambda x, s: _group(x, s, flags, bounded, export), here, state)
        d_tokens, d_state = pull((_cut(d_out, index, size * CHUNK), d_final, d_after))
        return d_state, d_tokens

    d_state, d_tokens = jax.lax.scan(
        step, d_final, (jnp.arange(groups), entering, d_states), reverse=True
    )
    return jax.tree.map(_joined, d_tokens), d_state, None


_grouped = jax.custom_vjp(_run, nondiff_argnums=(3, 4, 5))
_grouped.defvjp(_forward, _backward)


def group_size(chunks: int, rows_and_heads: int, bounded: bool) -> int:
    """Chunks per group, so that groups are equal and few chunks are added."""
    most = (MATRICES if bounded else MATRICES_UNBOUNDED) // rows_and_heads
    groups = -(-chunks // max(1, most))
    return -(-chunks // groups)


def obstacle(key_width: int, value_width: int, dtype: DTypeLike, bounded: bool) -> str:
    """Nothing: any width, either dtype, any gate, any device."""
    del key_width, value_width, dtype, bounded
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
