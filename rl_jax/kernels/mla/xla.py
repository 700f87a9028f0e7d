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


def _empty(q: Array, value_width: int) -> tuple[Array, Array, Array]:
    rows, heads, length, _ = q.shape
    peak = jnp.full((rows, heads, length), LOWEST, q.dtype)
    return peak, jnp.zeros_like(peak), jnp.zeros((rows, heads, length, value_width), q.dtype)


def _block(
    carry: tuple[Array, Array, Array],
    q: Float[Array, "R H L W"],
    keys: Float[Array, "R C W"],
    mask: Bool[Array, "R L C"],
) -> tuple[Array, Array, Array]:
    """One step of the online softmax (arXiv 2205.14135): (peak, mass, weighted values)."""
    peak, mass, total = carry
    mask = mask[:, None]
    scores = jnp.where(mask, jnp.einsum("rhlw,rcw->rhlc", q, keys), LOWEST)
    higher = jnp.maximum(peak, jax.lax.stop_gradient(scores.max(-1)))
    weights = jnp.where(mask, jnp.exp(scores - higher[..., None]), 0.0)
    shrink = jnp.exp(peak - higher)
    values = keys[..., : total.shape[-1]]
    total = total * shrink[..., None] + jnp.einsum("rhlc,rcv->rhlv", weights, values)
    return higher, mass * shrink + weights.sum(-1), total


def _finish(carry: tuple[Array, Array, Array]) -> Float[Array, "R L H V"]:
    _, mass, total = carry
    out = total / jnp.where(mass > 0, mass, 1.0)[..., None]
    return out.swapaxes(1, 2)


def attend_rows(
    q: Float[Array, "R L H W"],
    latents: Float[Array, "R L W"],
    segments: Int[Array, "R L"],
    *,
    value_width: int,
    scale: float,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment of packed rows; zeros for padding (segment -1)."""
    rows, length, _, width = q.shape
    q = (q * scale).swapaxes(1, 2)
    index = jnp.arange(length)

    def step(carry, block):
        keys, key_segments, key_index = block
        mask = segments[:, :, None] == key_segments[:, None, :]
        mask &= (key_segments >= 0)[:, None, :] & (key_index <= index[:, None])
        return _block(carry, q, keys, mask), None

    blocks = (
        latents.reshape(rows, -1, CHUNK, width).swapaxes(0, 1),
        segments.reshape(rows, -1, CHUNK).swapaxes(0, 1),
        index.reshape(-1, CHUNK),
    )
    return _finish(jax.lax.scan(step, _empty(q, value_width), blocks)[0])


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
        keys = jnp.where(written[..., None], keys, 0.0)
        mask = (index <= query_index[..., None]) & written[:, None, :]
        return _block(carry, q, keys, mask)

    used = jnp.max(jnp.where(n_valid > 0, (end + CHUNK - 1) // CHUNK, 0))
    return _finish(jax.lax.fori_loop(0, used, step, _empty(q, value_width)))
