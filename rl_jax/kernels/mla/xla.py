"""[P] Latent attention without positions, in blocks of 64 keys with an online softmax.

Queries come absorbed: a query, a key and the cached entry of a token share one width, and the value
is the first `value_width` numbers of the entry (arXiv 2405.04434, sec. 2.1.2). Blocks are taken in
the order of positions in training and against a cache alike, and a block masked out whole changes
no bit, so neither packing nor cuts at multiples of 64 do.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import CHUNK, Array

LOWEST = -1e30
"""Stands for minus infinity in running maxima: differences of it stay numbers."""


def _empty(q: Array, value_width: int) -> tuple[Array, Array]:
    rows, heads, length, _ = q.shape
    peak = jnp.full((rows, heads, length, 1), LOWEST, q.dtype)
    return peak, jnp.zeros((rows, heads, length, value_width + 1), q.dtype)


def _block(
    carry: tuple[Array, Array],
    q: Float[Array, "R H L W"],
    keys: Float[Array, "R C W"],
    mask: Bool[Array, "R L C"],
) -> tuple[Array, Array]:
    """One step of the online softmax (arXiv 2205.14135): (peak, weighted values | mass).

    The mass is the weighted sum of a column of ones, so one product makes both in one order.
    """
    peak, total = carry
    mask = mask[:, None]
    scores = jnp.where(mask, jnp.einsum("rhlw,rcw->rhlc", q, keys), LOWEST)
    higher = jnp.maximum(peak, scores.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - higher), 0.0)
    ones = jnp.ones_like(keys[..., :1])
    values = jnp.concatenate([keys[..., : total.shape[-1] - 1], ones], -1)
    total = total * jnp.exp(peak - higher) + jnp.einsum("rhlc,rcv->rhlv", weights, values)
    return higher, total


def _finish(carry: tuple[Array, Array]) -> Float[Array, "R H L V"]:
    total, mass = carry[1][..., :-1], carry[1][..., -1:]
    return total / jnp.where(mass > 0, mass, 1.0)


def attend_rows(
    q: Float[Array, "R L H W"],
    latents: Float[Array, "R L W"],
    segments: Int[Array, "R L"],
    *,
    value_width: int,
    scale: float,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment of packed rows; zeros for padding (segment -1)."""
    rows, length, heads, width = q.shape
    q = (q * scale).reshape(rows, -1, CHUNK, heads, width).transpose(1, 0, 3, 2, 4)
    keys = latents.reshape(rows, -1, CHUNK, width).swapaxes(0, 1)
    blocked = segments.reshape(rows, -1, CHUNK).swapaxes(0, 1)
    out = _causal(q, keys, blocked, value_width)
    return out.transpose(1, 0, 3, 2, 4).reshape(rows, length, heads, value_width)


def _attend_blocks(
    q: Float[Array, "N R H C W"],
    keys: Float[Array, "N R C W"],
    segments: Int[Array, "N R C"],
    value_width: int,
) -> Float[Array, "N R H C V"]:
    """Each block of queries over the blocks of keys up to its own."""
    return _causal_forward(q, keys, segments, value_width)[0]


def _visible(segments: Array, query: Array, key: Array) -> Bool[Array, "R L C"]:
    """What the queries of one block see of the keys of another."""
    row, column = query * CHUNK + jnp.arange(CHUNK), key * CHUNK + jnp.arange(CHUNK)
    of_query, of_key = segments[query][:, :, None], segments[key][:, None, :]
    return (of_query == of_key) & (of_key >= 0) & (column <= row[:, None])


def _causal_forward(q, keys, segments, value_width):
    def one(i):
        def step(j, carry):
            return _block(carry, q[i], keys[j], _visible(segments, i, j))

        peak, total = jax.lax.fori_loop(0, i + 1, step, _empty(q[i], value_width))
        mass = jnp.where(total[..., -1:] > 0, total[..., -1:], 1.0)
        return _finish((peak, total)), peak + jnp.log(mass)

    out, log_mass = jax.lax.map(one, jnp.arange(q.shape[0]))
    return out, (q, keys, segments, out, log_mass)


def _causal_backward(value_width, kept, d_out):
    """Weights are made again from the kept logarithm of their mass (arXiv 2205.14135, alg. 4)."""
    q, keys, segments, out, log_mass = kept
    inner = jnp.sum(d_out * out, -1, keepdims=True)

    def pair(i, j, carry):
        d_q, d_key = carry
        scores = jnp.einsum("rhlw,rcw->rhlc", q[i], keys[j])
        mask = _visible(segments, i, j)[:, None]
        weights = jnp.where(mask, jnp.exp(scores - log_mass[i]), 0.0)
        d_weights = jnp.einsum("rhlv,rcv->rhlc", d_out[i], keys[j, ..., :value_width])
        d_scores = weights * (d_weights - inner[i])
        d_q = d_q.at[i].add(jnp.einsum("rhlc,rcw->rhlw", d_scores, keys[j]))
        d_key = d_key + jnp.einsum("rhlc,rhlw->rcw", d_scores, q[i])
        d_value = jnp.einsum("rhlc,rhlv->rcv", weights, d_out[i])
        return d_q, d_key.at[..., :value_width].add(d_value)

    def column(d_q, j):
        carry = d_q, jnp.zeros_like(keys[0])
        return jax.lax.fori_loop(j, q.shape[0], lambda i, carry: pair(i, j, carry), carry)

    d_q, d_keys = jax.lax.scan(column, jnp.zeros_like(q), jnp.arange(q.shape[0]))
    return d_q, d_keys, None


_causal = jax.custom_vjp(_attend_blocks, nondiff_argnums=(3,))
_causal.defvjp(_causal_forward, _causal_backward)


def attend_cached(
    q: Float[Array, "R n H W"],
    cache: Float[Array, "R S W"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    *,
    value_width: int,
    scale: float,
) -> Float[Array, "R n H V"]:
    """Attention of n new tokens, the first at `positions`, to a cache that already holds them.

    S is a multiple of 64; entries past `positions + n_valid` may be anything.
    """
    length = q.shape[1]
    q = (q * scale).swapaxes(1, 2)
    query_index = positions[:, None] + jnp.arange(length)
    end = positions + n_valid

    def step(number, carry):
        keys = jax.lax.dynamic_slice_in_dim(cache, number * CHUNK, CHUNK, 1)
        index = number * CHUNK + jnp.arange(CHUNK)
        written = index < end[:, None]
        keys = jnp.where(written[..., None], keys, 0.0)  # garbage may be NaN
        mask = (index <= query_index[..., None]) & written[:, None, :]
        return _block(carry, q, keys, mask)

    used = jnp.max(jnp.where(n_valid > 0, (end + CHUNK - 1) // CHUNK, 0))
    return _finish(jax.lax.fori_loop(0, used, step, _empty(q, value_width))).swapaxes(1, 2)
