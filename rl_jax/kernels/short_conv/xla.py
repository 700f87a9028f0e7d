"""[P] Causal depthwise convolution of a few taps, then SiLU, in plain XLA.

Channels may have any shape; a tap never reaches into another segment of a packed row. The backward
pass keeps the inputs alone and computes what lies between again.
"""

from collections.abc import Iterator
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import Array


def short_conv(
    x: Float[Array, "R L *ch"],
    weight: Float[Array, "taps *ch"],
    tail: Float[Array, "R before *ch"] | None = None,
    segments: Int[Array, "R L"] | None = None,
    tail_segments: Int[Array, "R before"] | None = None,
) -> Float[Array, "R L *ch"]:
    """silu(sum_d weight[d] x[t - taps + 1 + d]), in x's dtype, added up in float32.

    `tail` holds the taps - 1 inputs before `x`, oldest first (zeros without it); with segments it
    needs segments of its own.
    """
    check(x, weight, tail, segments, tail_segments)
    return _conv(x, weight, tail, segments, tail_segments)


def check(
    x: Array,
    weight: Array,
    tail: Array | None,
    segments: Array | None,
    tail_segments: Array | None,
) -> None:
    """Operands of `short_conv`: ValueError naming the argument and what it must be."""
    if x.shape[2:] != weight.shape[1:]:
        raise ValueError(f"weight: channels {weight.shape[1:]} must be x's {x.shape[2:]}")
    wanted = (x.shape[0], weight.shape[0] - 1, *x.shape[2:])
    if tail is not None and tail.shape != wanted:
        raise ValueError(f"tail: shape {tail.shape} must be {wanted}")
    if segments is not None and segments.shape != x.shape[:2]:
        raise ValueError(f"segments: shape {segments.shape} must be {x.shape[:2]}")
    if (tail_segments is None) == (tail is not None and segments is not None):
        raise ValueError("tail_segments: needed where tail and segments are given, and only there")


def _same(
    segments: Array | None, tail_segments: Array | None, back: int
) -> Bool[Array, "R L"] | None:
    """Whether the input `back` tokens before is of the same segment; None where all are."""
    if segments is None or back == 0:
        return None
    length = segments.shape[1]
    if tail_segments is None:
        before = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-2)[:, :length]
    else:
        joined = jnp.concatenate([tail_segments, segments], 1)
        start = tail_segments.shape[1] - back
        before = jax.lax.slice_in_dim(joined, start, start + length, axis=1)
    return before == segments


def _kept(x: Array, same: Bool[Array, "R L"] | None) -> Array:
    return x if same is None else jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), x, 0.0)


def _taps(x, taps, tail, segments, tail_segments) -> Iterator[tuple[int, Array]]:
    """For each tap from the latest: its index, and the inputs [R, L, ...] it multiplies."""
    padded = _with_tail(x, tail, taps)
    for back in range(taps):
        start = taps - 1 - back
        past = jax.lax.slice_in_dim(padded, start, start + x.shape[1], axis=1)
        yield start, _kept(past, _same(segments, tail_segments, back))


def _before_silu(x, weight, tail, segments, tail_segments) -> Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    weight = weight.astype(exact)
    taps = _taps(x, weight.shape[0], tail, segments, tail_segments)
    return reduce(add, (past.astype(exact) * weight[tap] for tap, past in taps))


def _run(x, weight, tail, segments, tail_segments):
    return jax.nn.silu(_before_silu(x, weight, tail, segments, tail_segments)).astype(x.dtype)


def _forward(*operands):
    return _run(*operands), operands


def _spread(d_mixed, weight, segments, tail_segments) -> Iterator[Array]:
    """For each tap from the latest: what it hands back to tail and inputs."""
    taps = weight.shape[0]
    for back in range(taps):
        same = _same(segments, tail_segments, back)
        term = _kept(d_mixed, same) * weight[taps - 1 - back].astype(d_mixed.dtype)
        around = ((0, 0), (taps - 1 - back, back), *((0, 0),) * (d_mixed.ndim - 2))
        yield jnp.pad(term, around)


def _backward(operands, d_out):
    x, weight, tail, segments, tail_segments = operands
    taps = weight.shape[0]
    out = _before_silu(*operands)
    gate = jax.nn.sigmoid(out)
    d_mixed = d_out.astype(out.dtype) * gate * (1 + out * (1 - gate))
    pasts = _taps(x, taps, tail, segments, tail_segments)
    d_weight = [jnp.sum(past.astype(out.dtype) * d_mixed, (0, 1)) for _, past in pasts]
    d_padded = reduce(add, _spread(d_mixed, weight, segments, tail_segments))
    d_tail, d_x = jnp.split(d_padded.astype(x.dtype), [taps - 1], axis=1)
    d_tail = None if tail is None else d_tail.astype(tail.dtype)
    return d_x, jnp.stack(d_weight[::-1]).astype(weight.dtype), d_tail, None, None


_conv = jax.custom_vjp(_run)
_conv.defvjp(_forward, _backward)


def next_tail(
    x: Float[Array, "R L *ch"], tail: Float[Array, "R before *ch"], n_valid: Int[Array, " R"]
) -> Float[Array, "R before *ch"]:
    """The last inputs among `tail` and the first `n_valid` of `x`."""
    before = tail.shape[1]
    padded = jnp.concatenate([tail, x], 1)
    return jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, before))(padded, n_valid)


def _with_tail(x: Array, tail: Array | None, taps: int) -> Array:
    if tail is None:
        return jnp.pad(x, ((0, 0), (taps - 1, 0), *((0, 0),) * (x.ndim - 2)))
    return jnp.concatenate([tail.astype(x.dtype), x], 1)
