"""[P] The short convolution of rows that lie in shards along a mesh axis, inside `shard_map`.

A shard needs the last taps - 1 inputs of the shard before, and their segments: one exchange with
the neighbour, so the bits are those of one device.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import Array
from rl_jax.kernels.short_conv.xla import check
from rl_jax.kernels.short_conv.xla import short_conv as local_conv


def short_conv(
    x: Float[Array, "R L *ch"],
    weight: Float[Array, "taps *ch"],
    tail: Float[Array, "R before *ch"] | None = None,
    segments: Int[Array, "R L"] | None = None,
    tail_segments: Int[Array, "R before"] | None = None,
    *,
    axis: str,
) -> Float[Array, "R L *ch"]:
    """`xla.short_conv` of tokens in contiguous shards of L along `axis`, each at least taps - 1.

    `tail` and its segments come before the first shard; they count on the first device alone.
    """
    check(x, weight, tail, segments, tail_segments)
    before, length = weight.shape[0] - 1, x.shape[1]
    if length < before:
        raise ValueError(f"x: a shard of {length} tokens must hold the {before} inputs of a tail")
    if tail is None:
        tail = jnp.zeros((x.shape[0], before, *x.shape[2:]), x.dtype)
    halo = _from_before(x[:, length - before :], tail.astype(x.dtype), axis)
    if segments is None:
        return local_conv(x, weight, halo)
    if tail_segments is None:
        tail_segments = jnp.full((x.shape[0], before), -2, segments.dtype)
    of_halo = _from_before(segments[:, length - before :], tail_segments, axis)
    return local_conv(x, weight, halo, segments, of_halo)


def _from_before(own: Array, at_start: Array, axis: str) -> Array:
    """What the shard before sends; `at_start` on the first."""
    following = [(i, i + 1) for i in range(jax.lax.axis_size(axis) - 1)]
    received = jax.lax.ppermute(own, axis, following)
    return jnp.where(jax.lax.axis_index(axis) == 0, at_start, received)
