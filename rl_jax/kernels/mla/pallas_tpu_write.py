"""[P] Tokens into pages of the pool on a TPU (Pallas, Mosaic), in place.

A DMA starts at a *tile*, 8 lines of 128 words; a token of 576 words takes 4.5 lines. So tokens are
shifted to where they lie in their tiles, the first and the last tile are read, blended with and
written back, and whole tiles (whole pages, in prefill) are written as they are.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from rl_jax.arrays import CHUNK, Array, round_up
from rl_jax.kernels.mla.pallas_tpu_pages import unsupported
from rl_jax.kernels.pages import LANES, TILE, DevicePool

TILE_WORDS = TILE * LANES
STEP_BYTES = 4 << 20
"""VMEM of the windows that are read, then written, at a time."""


class _Cut(NamedTuple):
    """Static sizes of one call. A *window* is a run of tiles that one step blends."""

    width: int
    window: int
    """Tiles of a window."""
    windows: int
    """Of one row."""
    lead: int
    """Lines of zeros before a row's values."""

    @property
    def page_tiles(self) -> int:
        return CHUNK * self.width // TILE_WORDS

    @property
    def by_page(self) -> bool:
        """Windows are pages; otherwise a row has one, from the first tile it touches."""
        return self.window == self.page_tiles

    @property
    def lines(self) -> int:
        return self.window * TILE

    @property
    def table_width(self) -> int:
        """Pages a row's windows touch."""
        return self.windows if self.by_page else 2


def _cut(length: int, width: int) -> _Cut:
    page_tiles = CHUNK * width // TILE_WORDS
    window = -(-(length * width + TILE_WORDS - LANES // 2) // TILE_WORDS)
    if window < page_tiles:
        return _Cut(width, window, 1, TILE)
    lead = round_up((CHUNK - 1) * width // LANES + 1, TILE)
    return _Cut(width, page_tiles, (length + CHUNK - 2) // CHUNK + 1, lead)


def write_pages(
    pool: DevicePool,
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    values: Float[Array, "R n W"],
) -> DevicePool:
    """The pool with n tokens, the first at `positions`, in their rows' pages, as float32 bits.

    Changes a donated pool in place. Tokens from n_valid on are written nowhere. A page is
    written by one row at most. W is a multiple of 64.
    """
    rows, length, width = values.shape
    fault = unsupported(width, None, values.dtype)
    if fault:
        raise ValueError(f"values: {fault}")
    cut = _cut(length, width)
    start = positions % CHUNK * width
    first_tile = jnp.zeros_like(start) if cut.by_page else start // TILE_WORDS
    shift = start - first_tile * TILE_WORDS
    before = jnp.arange(cut.windows) * cut.window
    low = shift[:, None] - before * TILE_WORDS
    high = low + (n_valid * width)[:, None]
    touched = positions[:, None] // CHUNK + jnp.arange(cut.table_width)
    table = jnp.take_along_axis(pages, jnp.minimum(touched, pages.shape[1] - 1), 1)
    per_item = (
        jnp.maximum(low, 0),
        jnp.minimum(high, cut.window * TILE_WORDS),
        jnp.broadcast_to(shift[:, None], low.shape),
        first_tile[:, None] + before,
    )
    step = _items_per_step(rows * cut.windows, cut)
    items = round_up(rows * cut.windows, step)
    scalars = [_padded(x, items) for x in per_item]
    words = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    words = words.reshape(rows, -1)
    total = (cut.lead + cut.windows * cut.lines) * LANES
    lead = cut.lead * LANES
    words = jnp.pad(words, ((0, 0), (lead, total - lead - words.shape[1])))
    return _call(cut, step, table.astype(jnp.int32).reshape(-1), scalars, words, pool)


def _items_per_step(items: int, cut: _Cut) -> int:
    return max(1, min(items, STEP_BYTES // (2 * (cut.lines + TILE) * LANES * 4)))


def _padded(x: Array, items: int) -> Array:
    """An item of zeros has nothing to write."""
    flat = x.astype(jnp.int32).reshape(-1)
    return jnp.pad(flat, (0, items - flat.shape[0]))


def _call(cut: _Cut, step: int, table: Array, scalars: list, words: Array, pool: Array) -> Array:
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_write_kernel, step=step, cut=cut),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(scalars),
            grid=(scalars[0].shape[0] // step,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((step, cut.lines + TILE, LANES), jnp.uint32),
                pltpu.VMEM((step, cut.lines, LANES), jnp.uint32),
                pltpu.VMEM((step, 2, TILE, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((step,)),
                pltpu.SemaphoreType.DMA((step,)),
            ],
        ),
        input_output_aliases={2 + len(scalars): 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="write_pages",
    )(table, *scalars, words.reshape(words.shape[0], -1, LANES), pool)


def _write_kernel(
    table, low, high, shift, tile, words, _, pool, new, ready, edges, read, written, *, step, cut
):
    """A step's items one after the other: start reads; then blend, start writes; then wait.

    Words [low, high) of an item's window are new. Reads go through the output, which is the pool.
    """

    def in_pool(item, number):
        """Tile `number` of an item's window."""
        at = tile[item] + number
        page = table[item // cut.windows * cut.table_width + at // cut.page_tiles]
        line = pl.multiple_of(at % cut.page_tiles * TILE, TILE)
        return pool.at[page, pl.ds(line, TILE)]

    def reads(place, act):
        item = pl.program_id(0) * step + place
        lines = shift[item] // LANES
        start = item % cut.windows * cut.lines + cut.lead
        start = start - (lines // TILE + 1) * TILE
        start = pl.multiple_of(start, TILE)
        source = words.at[item // cut.windows, pl.ds(start, cut.lines + TILE)]
        act(pltpu.make_async_copy(source, new.at[place], read.at[place]))
        for edge, (inside, number) in enumerate(_edges(low[item], high[item])):

            @pl.when(inside)
            def _(edge=edge, number=number):
                copy = in_pool(item, number), edges.at[place, edge], read.at[place]
                act(pltpu.make_async_copy(*copy))

    def writes(place, act):
        item = pl.program_id(0) * step + place
        whole = (high[item] - low[item] == cut.window * TILE_WORDS) & cut.by_page

        @pl.when(whole)
        def _():
            page = table[item // cut.windows * cut.table_width + tile[item] // cut.page_tiles]
            target = pool.at[page, pl.ds(0, cut.lines)]
            act(pltpu.make_async_copy(ready.at[place], target, written.at[place]))

        def one(number, _):
            line = pl.multiple_of(number * TILE, TILE)
            source = ready.at[place, pl.ds(line, TILE)]
            act(pltpu.make_async_copy(source, in_pool(item, number), written.at[place]))

        @pl.when(~whole)
        def _():
            end = (high[item] - 1) // TILE_WORDS + 1
            jax.lax.fori_loop(low[item] // TILE_WORDS, end, one, None)

    def blend(place):
        item = pl.program_id(0) * step + place
        _shift(new.at[place], ready.at[place], shift[item], cut)
        for edge, (inside, number) in enumerate(_edges(low[item], high[item])):

            @pl.when(inside)
            def _(edge=edge, number=number):
                at = ready.at[place, pl.ds(pl.multiple_of(number * TILE, TILE), TILE)]
                word = number * TILE_WORDS + _words(at.shape)
                keep = word >= low[item] if edge == 0 else word < high[item]
                at[...] = jnp.where(keep, at[...], edges[place, edge])

    def every(act):
        def one(place, _):
            item = pl.program_id(0) * step + place

            @pl.when(high[item] > low[item])
            def _():
                act(place)

        jax.lax.fori_loop(0, step, one, None)

    every(lambda place: reads(place, lambda copy: copy.start()))

    def blend_and_write(place):
        reads(place, lambda copy: copy.wait())
        blend(place)
        writes(place, lambda copy: copy.start())

    every(blend_and_write)
    every(lambda place: writes(place, lambda copy: copy.wait()))


def _edges(low, high):
    """(whether it is written in part only, tile) of the first and the last tile of a window."""
    return (low % TILE_WORDS != 0, low // TILE_WORDS), (
        high % TILE_WORDS != 0,
        (high - 1) // TILE_WORDS,
    )


def _words(shape):
    line = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return line * LANES + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _shift(new, ready, shift, cut):
    """Values `shift` words on: by whole lines in the load, by half a line in the lanes."""
    lines = shift // LANES
    start = (lines // TILE + 1) * TILE - lines
    here = new[pl.ds(start, cut.lines), :]
    ready[...] = here

    @pl.when(shift % LANES != 0)
    def _():
        above = new[pl.ds(start - 1, cut.lines), :]
        half = LANES // 2
        left = jax.lax.broadcasted_iota(jnp.int32, here.shape, 1) < half
        ready[...] = jnp.where(left, pltpu.roll(above, half, 1), pltpu.roll(here, half, 1))
