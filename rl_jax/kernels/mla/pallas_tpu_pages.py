"""[P] Latent attention to pages of the pool on a TPU (Pallas, Mosaic), read where they lie.

A page is 64 tokens x `width` words, flat over its lines of 128 words. One token, or two where the
width is half a line over (576 = 4.5 lines), fill whole lines: their *period*. A strided load of
every period's line r is a block [tokens, 128] of one *phase*, the tokens of a page at one place of
the period. Where the phase starts in the middle of a line the queries are shifted instead of the
keys, and the weighted values are shifted back once, at the end.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import CHUNK, Array, round_up
from rl_jax.kernels.pages import LANES, TILE, DevicePool

PART = 8
"""Pages of one step of the online softmax, whatever the batch and the row's length."""
SLOTS = 3
"""Parts in VMEM: one at work, the others on their way."""
TILE_ROWS = 512
"""Queries x heads at work at once: enough products for each byte of a page."""
TABLE_LIMIT = 1 << 17
"""Page ids of one call; they lie in scalar memory, 1 MiB on the smallest TPU."""
VMEM_LIMIT = 48 << 20
LOWEST = -1e30
DTYPES = ("float32", "bfloat16")


class _Phase(NamedTuple):
    """Where the tokens of one place in the period lie."""

    line: int
    """First line within the period."""
    lines: int
    """Lines that hold the token."""
    value_lines: int
    """Lines that hold its value."""
    shift: int
    """Words of the first line before the token."""


class _Cut(NamedTuple):
    """Static sizes of one call."""

    width: int
    value_width: int
    tile: int
    """Tokens whose queries are at work at once."""
    heads: int
    """Padded to whole sublanes."""
    tiles: int
    """Of one row."""
    table_width: int
    """Pages of a row in the table."""
    scale: float

    @property
    def page_lines(self) -> int:
        return CHUNK * self.width // LANES

    @property
    def period_lines(self) -> int:
        return self.width * len(self.phases) // LANES

    @property
    def phases(self) -> tuple[_Phase, ...]:
        count = 1 if self.width % LANES == 0 else 2
        return tuple(
            _Phase(
                word // LANES,
                (word % LANES + self.width - 1) // LANES + 1,
                (word % LANES + self.value_width - 1) // LANES + 1,
                word % LANES,
            )
            for word in (0, self.width)[:count]
        )


def unsupported(width: int, value_width: int | None, dtype: DTypeLike) -> str:
    """Why the kernels of pages take no such operands on any TPU; empty where they do.

    `value_width` is None for writing.
    """
    if width % (LANES // 2):
        return f"width {width} is not a multiple of {LANES // 2}"
    if value_width is not None and not 0 < value_width <= width:
        return f"value width {value_width} is not within the width {width}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name} is not {' or '.join(DTYPES)}"
    return ""


def attend_pages(
    q: Float[Array, "R n H W"],
    pool: DevicePool,
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    *,
    value_width: int,
    scale: float,
) -> Float[Array, "R n H V"]:
    """Causal attention of n tokens, the first at `positions`, to pages that already hold them.

    Products take operands of q's dtype (float32: all its bits) and sum in float32. The keys are
    cut at multiples of 512 tokens, so a row's bits depend on its own queries alone. Outputs of
    tokens that are not valid are zero. Online softmax: arXiv 2205.14135.
    """
    rows, length, heads, width = q.shape
    fault = unsupported(width, value_width, q.dtype)
    if fault:
        raise ValueError(f"q: {fault}")
    if pages.shape[1] > TABLE_LIMIT:
        raise ValueError(f"pages: {pages.shape[1]} of one row must be at most {TABLE_LIMIT}")
    padded_heads = round_up(heads, 32 // q.dtype.itemsize)
    tile = max(1, min(length, TILE_ROWS // padded_heads))
    tiles = -(-length // tile)
    cut = _Cut(width, value_width, tile, padded_heads, tiles, pages.shape[1], scale)
    padding = (0, 0), (0, tiles * tile - length), (0, padded_heads - heads), (0, 0)
    padded = jnp.pad(q, padding).reshape(rows, tiles, tile * padded_heads, width)
    operands = padded, pages, positions, n_valid
    group = _rows_per_call(rows, pages.shape[1])
    if group == rows:
        out = _attend_rows(cut, pool, *operands)
    else:
        grouped = [x.reshape(-1, group, *x.shape[1:]) for x in operands]
        out = jax.lax.map(lambda group: _attend_rows(cut, pool, *group), tuple(grouped))
    return out.reshape(rows, tiles * tile, padded_heads, value_width)[:, :length, :heads]


def _rows_per_call(rows: int, table_width: int) -> int:
    """The largest divisor of `rows` whose page ids fit."""
    return max(g for g in range(1, rows + 1) if rows % g == 0 and g * table_width <= TABLE_LIMIT)


def _attend_rows(
    cut: _Cut, pool: Array, q: Array, pages: Array, positions: Array, n_valid: Array
) -> Array:
    """One call of the kernel over rows x tiles of queries, each an item."""
    items = q.shape[0] * cut.tiles
    first = positions[:, None] + jnp.arange(cut.tiles) * cut.tile
    end = jnp.minimum(first + cut.tile, (positions + n_valid)[:, None])
    end = jnp.where(end > first, end, 0).astype(jnp.int32).reshape(-1)
    after = jnp.where(end > 0, jnp.arange(items), items)
    after = jnp.append(jax.lax.cummin(after, reverse=True), items).astype(jnp.int32)
    scalars = pages.astype(jnp.int32).reshape(-1), first.astype(jnp.int32).reshape(-1), end, after
    lines = cut.tile * cut.heads
    out = jax.ShapeDtypeStruct((items, lines, cut.value_width), q.dtype)

    def of_item(width):
        return pl.BlockSpec((None, lines, width), lambda item, *_: (item, 0, 0))

    return pl.pallas_call(
        partial(_attend_kernel, cut=cut),
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(items,),
            in_specs=[of_item(cut.width), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=of_item(cut.value_width),
            scratch_shapes=[
                pltpu.VMEM((SLOTS, PART * cut.page_lines, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.VMEM((len(cut.phases), lines, cut.phases[0].lines * LANES), q.dtype),
                pltpu.VMEM((lines, LANES), jnp.float32),
                pltpu.VMEM((lines, LANES), jnp.float32),
                *(pltpu.VMEM((lines, p.value_lines * LANES), jnp.float32) for p in cut.phases),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="attend_pages",
    )(*scalars, q.reshape(items, lines, -1), pool)


def _attend_kernel(table, first, end, after, q, pool, out, buffer, arrived, cursor, *sums, cut):
    """One item: its queries over the parts of its row's pages, which a ring of DMAs brings.

    The ring runs on over the items' borders. `cursor`: the next part to send for (item, part, its
    number) and the number of the part to work on next.
    """
    item = pl.program_id(0)
    queries, peak, mass, *totals = sums

    def copies(of_item, part, number, act):
        slot = number % SLOTS

        def one(place, _):
            page = table[of_item // cut.tiles * cut.table_width + part * PART + place]
            line = pl.multiple_of(place * cut.page_lines, TILE)
            source = pool.at[page, pl.ds(0, cut.page_lines)]
            target = buffer.at[slot, pl.ds(line, cut.page_lines)]
            act(pltpu.make_async_copy(source, target, arrived.at[slot]))

        used = pl.cdiv(end[of_item], CHUNK) - part * PART
        jax.lax.fori_loop(0, jnp.minimum(used, PART), one, None)

    def send():
        of_item, part, number = cursor[0], cursor[1], cursor[2]

        @pl.when(of_item < pl.num_programs(0))
        def _():
            copies(of_item, part, number, lambda copy: copy.start())
            last = (part + 1) * PART * CHUNK >= end[of_item]
            cursor[0] = jnp.where(last, after[of_item + 1], of_item)
            cursor[1] = jnp.where(last, 0, part + 1)
            cursor[2] = number + 1

    @pl.when(item == 0)
    def _():
        cursor[0], cursor[1], cursor[2], cursor[3] = after[0], 0, 0, 0
        for _ in range(SLOTS - 1):
            send()

    _place_queries(q, queries, cut)
    peak[...] = jnp.full_like(peak, LOWEST)
    mass[...] = jnp.zeros_like(mass)
    for total in totals:
        total[...] = jnp.zeros_like(total)

    def attend(part, masked):
        number = cursor[3]
        send()
        copies(item, part, number, lambda copy: copy.wait())
        keys = buffer.at[number % SLOTS]
        before = part * PART * CHUNK
        if masked:
            _clear(keys, (end[item] - before) * cut.width)
        seen = (first[item] - before, end[item] - before) if masked else None
        _attend_part(queries, keys, seen, peak, mass, totals, cut)
        cursor[3] = number + 1

    parts = pl.cdiv(end[item], PART * CHUNK)
    whole = jnp.minimum((first[item] + 1) // (PART * CHUNK), parts)
    jax.lax.fori_loop(0, whole, lambda part, _: attend(part, False), None)
    jax.lax.fori_loop(whole, parts, lambda part, _: attend(part, True), None)
    scale = 1 / jnp.where(mass[:, :1] > 0, mass[:, :1], 1)
    values = sum(
        total[:, phase.shift : phase.shift + cut.value_width]
        for total, phase in zip(totals, cut.phases, strict=True)
    )
    shape = cut.tile, cut.heads, cut.value_width
    valid = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < end[item] - first[item]
    values = jnp.where(valid, (values * scale).reshape(shape), 0)
    out[...] = values.reshape(out.shape).astype(out.dtype)


def _place_queries(q, queries, cut):
    """The queries of every phase: where its tokens lie in their lines, zeros beside."""
    padding = queries.shape[-1] - cut.width
    padded = q[...]
    if padding:
        padded = jnp.concatenate([padded, jnp.zeros((q.shape[0], padding), q.dtype)], 1)
    for number, phase in enumerate(cut.phases):
        queries[number] = pltpu.roll(padded, phase.shift, 1) if phase.shift else padded


def _clear(keys, words):
    """Zeroes a part after its first `words`: pages not loaded, and what others left in the last."""

    @pl.when(words < keys.shape[0] * LANES)
    def _():
        line = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1)
        keys[...] = jnp.where(line * LANES + lane < words, keys[...], jnp.uint32(0))


def _attend_part(queries, keys, seen, peak, mass, totals, cut):
    """One step of the online softmax over the tokens of a part.

    `seen`: (position of the first query, end of the keys) within the part, or None where every
    query sees every token.
    """
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    product = partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    count = PART * CHUNK // len(cut.phases)
    blocks, scores = [], []
    for number, phase in enumerate(cut.phases):
        lines = [
            keys[pl.ds(phase.line + line, count, stride=cut.period_lines), :]
            for line in range(phase.lines)
        ]
        block = jax.lax.bitcast_convert_type(jnp.concatenate(lines, 1), jnp.float32)
        block = block.astype(queries.dtype)
        score = product(queries[number], block, (((1,), (1,)), ((), ()))) * cut.scale
        blocks.append(block)
        scores.append(score if seen is None else _masked(score, number, seen, cut))
    score = jnp.concatenate(scores, 1)
    higher = jnp.maximum(peak[:, :1], jnp.max(score, 1, keepdims=True))
    weights, fade = jnp.exp(score - higher), jnp.exp(peak[:, :1] - higher)
    mass[...] = mass[...] * fade + jnp.sum(weights, 1, keepdims=True)
    peak[...] = jnp.broadcast_to(higher, peak.shape)
    for number, (phase, block, total) in enumerate(zip(cut.phases, blocks, totals, strict=True)):
        weight = weights[:, number * count : (number + 1) * count].astype(queries.dtype)
        values = block[:, : phase.value_lines * LANES]
        total[...] = total[...] * fade + product(weight, values, (((1,), (0,)), ((), ())))


def _masked(score, phase, seen, cut):
    """Scores of tokens after the query's own, or not there, as `LOWEST`."""
    first, end = seen
    shape = cut.tile, cut.heads, score.shape[1]
    query = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    token = phase + len(cut.phases) * jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    visible = (token <= query) & (token < end)
    return jnp.where(visible, score.reshape(shape), LOWEST).reshape(score.shape)
