"""[P] Which blocks of queries and of keys of a row can see each other, as ranges of blocks.

Every row has ranges of its own. Segments may lie in any way. Where each lies together and no block
holds parts of two, as in packed rows cut at multiples of 64, a range holds blocks of its segment
alone. A block of several counts by its lowest and its highest number, and its range may hold more.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from rl_jax.arrays import CHUNK, Array

AT_ONCE = 128
"""Blocks whose ranges are found together: their table of pairs is small at any length."""
BEYOND = 2**30
"""Above any number of a segment."""

Ranges = tuple[Int[Array, "R N"], Int[Array, "R N"]]
"""First block, and the one after the last; both 0 where there is none."""


def keys_seen(segments: Array, key_segments: Array, first: int | Array, block: int) -> Ranges:
    """For each block of queries: the blocks of 64 keys that its queries may see.

    Queries [R, L] in blocks of `block` are tokens first.. of the rows of keys [R, S].
    """
    starts = jnp.arange(key_segments.shape[1] // CHUNK) * CHUNK
    extents = _extents(segments, block), _extents(key_segments, CHUNK)
    return _ranges(*extents, lambda i: starts < first + (i + 1) * block)


def queries_seeing(segments: Array, key_segments: Array, first: int | Array, block: int) -> Ranges:
    """For each block of 64 keys: the blocks of queries that may see them."""
    ends = first + (1 + jnp.arange(segments.shape[1] // block)) * block
    extents = _extents(key_segments, CHUNK), _extents(segments, block)
    return _ranges(*extents, lambda j: j * CHUNK < ends)


def _extents(segments: Int[Array, "R M"], block: int) -> tuple[Array, Array]:
    """Lowest and highest segment of each block, BEYOND and -1 where all is padding: [n, R] each."""
    blocks = segments.reshape(segments.shape[0], -1, block).swapaxes(0, 1)
    return jnp.where(blocks >= 0, blocks, BEYOND).min(-1), blocks.max(-1)


def _ranges(
    own: tuple[Array, Array],
    other: tuple[Array, Array],
    causal: Callable[[Array], Bool[Array, " M"]],
) -> Ranges:
    count = other[0].shape[0]

    def one(block):
        index, low, high = block
        seen = (low <= other[1]) & (other[0] <= high) & causal(index)[:, None]
        begin, end = seen.argmax(0), count - seen[::-1].argmax(0)
        return begin, jnp.where(seen.any(0), end, 0)

    blocks = jnp.arange(own[0].shape[0]), *own
    begin, end = jax.lax.map(one, blocks, batch_size=min(AT_ONCE, own[0].shape[0]))
    return begin.T, end.T
