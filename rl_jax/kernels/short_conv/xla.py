"""[P] Causal depthwise convolution of a few taps, then SiLU, in plain XLA.

Channels may have any shape; a tap never reaches into another segment of a packed row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import Array


def short_conv(
    x: Float[Array, "R L *ch"],
    weight: Float[Array, "taps *ch"],
    tail: Float[Array, "R before *ch"] | None = None,
    segments: Int[Array, "R L"] | None = None,
) -> Float[Array, "R L *ch"]:
    """silu(sum_d weight[d] x[t - taps + 1 + d]).

    `tail` holds the taps - 1 inputs before `x`, oldest first (zeros without it).
    """
    taps, length = weight.shape[0], x.shape[1]
    padded = _with_tail(x, tail, taps)
    out = x * weight[-1]
    for back in range(1, taps):
        start = taps - 1 - back
        past = jax.lax.slice_in_dim(padded, start, start + length, axis=1)
        if segments is not None:
            before = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-2)[:, :length]
            same = (before == segments).reshape(*segments.shape, *(1,) * (x.ndim - 2))
            past = jnp.where(same, past, 0.0)
        out = out + past * weight[start]
    return jax.nn.silu(out)


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
    return jnp.concatenate([tail, x], 1)
