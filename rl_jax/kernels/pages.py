"""[P] Lines of pool pages: what kernels know of the pool besides the table they are given.

One device's pool is uint32[pages, lines, 128]: raw bits, so no NaN pattern of a state is ever
touched by arithmetic. A line is as wide as a TPU's vector register; a copy between a TPU's memories
may start only at multiples of `TILE` lines. Reading and writing whole tiles needs no other view of
the pool, which on a TPU would be a copy of it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

LANES = 128
"""uint32 words of a line."""
TILE = 8
"""Lines."""
NULL_PAGE = 0
"""Idle rows and padding write there and nobody reads it."""

_EXACT = {"mode": "promise_in_bounds", "wrap_negative_indices": False}

DevicePool = UInt32[Array, "pages lines 128"]


def lines_of(words: int) -> int:
    """Lines that `words` words take."""
    return -(-words // LANES)


def head_places(
    pages: Int[Array, "R P"], heads: int, head_lines: int
) -> tuple[Int[Array, "R H"], Int[Array, " H"]]:
    """(page, first line) of every head of R rows, H / P heads a page."""
    number, per_page = jnp.arange(heads), heads // pages.shape[1]
    return pages[:, number // per_page], number % per_page * head_lines


def read_lines(
    pool: DevicePool, pages: Int[Array, "*N"], lines: Int[Array, "..."], words: int, after: int = 0
) -> Float[Array, "*N words"]:
    """`words` numbers of each page, from `after` lines behind line `lines` on.

    `lines` are multiples of TILE and may broadcast.
    """
    tiles, at = _tiles(pool, pages, lines, words, after)
    flat = _read(tiles, at).reshape(*pages.shape, -1)
    first = after % TILE * LANES
    return jax.lax.bitcast_convert_type(flat[..., first : first + words], jnp.float32)


def write_lines(
    pool: DevicePool,
    pages: Int[Array, "*N"],
    lines: Int[Array, "..."],
    values: Float[Array, "*N words"],
    after: int = 0,
) -> DevicePool:
    """Writes what `read_lines` reads, and nothing else."""
    tiles, at = _tiles(pool, pages, lines, values.shape[-1], after)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    if values.shape[-1] % (TILE * LANES) or after % TILE:
        kept = _read(tiles, at).reshape(*pages.shape, -1)
        bits = jax.lax.dynamic_update_slice_in_dim(kept, bits, after % TILE * LANES, -1)
    bits = bits.reshape(*at.shape, TILE, LANES)
    return tiles.at[at].set(bits, **_EXACT).reshape(pool.shape)


def _read(tiles: UInt32[Array, "tiles 8 128"], at: Int[Array, "*N"]) -> UInt32[Array, "*N 8 128"]:
    """Once, before the pool changes: fused into later use, it would need a copy of the pool."""
    return jax.lax.optimization_barrier(tiles.at[at].get(**_EXACT))


def _tiles(
    pool: Array, pages: Array, lines: Array, words: int, after: int
) -> tuple[UInt32[Array, "tiles 8 128"], Int[Array, "*N n"]]:
    """The pool as tiles, and the numbers of those that hold the words.

    A gather of whole tiles reads the pool where it is; for one from any line, XLA first copies the
    pool to another layout on a TPU, and a scatter to any line is a loop over its rows.
    """
    if pool.shape[1] % TILE:
        raise ValueError(f"pool: {pool.shape[1]} lines of a page must be a multiple of {TILE}")
    first = (pages * pool.shape[1] + lines.astype(pages.dtype)) // TILE + after // TILE
    count = -(-(after % TILE + lines_of(words)) // TILE)
    numbers = jnp.arange(count, dtype=pages.dtype)
    return pool.reshape(-1, TILE, LANES), first[..., None] + numbers
