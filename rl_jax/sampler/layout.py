"""[P] Pages: the pool, what a page holds, and the only functions that read and write it.

The pool is uint32[data, tensor, pages, words]: raw bits, so no NaN pattern of a state is ever
touched by arithmetic. All pages have one size and one allocator, whatever they hold:

- a *token page* holds 64 tokens x width of one layer (MLA latents), the same in every tensor rank;
- a *state page* holds whole heads of one layer, head by head: state, then convolution tail. Rank t
  of the tensor axis holds heads [t * H/T, (t + 1) * H/T) under the same page id, so a head's bytes
  are self-contained and another tensor degree is a re-layout of whole heads.

Page 0 is the null page: idle rows and padding write there and nobody reads it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from rl_jax.arrays import CHUNK, AnyArray
from rl_jax.model import CacheIO, CacheSpec, StateCache
from rl_jax.sharding import DATA, TENSOR

NULL_PAGE = 0
WORD_BYTES = 4

Pool = UInt32[Array, "data tensor pages words"]


class Layout(NamedTuple):
    """Sizes of one pool, a pure function of the model's cache and the mesh."""

    spec: CacheSpec
    data: int
    tensor: int
    pages: int
    """Per data shard, the null page included."""
    words: int
    """uint32 words of a page."""
    heads_per_page: tuple[int, ...]
    """Per state layer."""
    token_pages: int
    """Token pages a sequence has per token layer: its longest context / 64."""

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence at the longest context, all layers together."""
        states = sum(self.state_pages(layer) for layer in range(len(self.spec.states)))
        return states + self.token_pages * len(self.spec.tokens)

    def state_pages(self, layer: int) -> int:
        """Pages of one sequence's state in one layer, per tensor rank."""
        return self.spec.states[layer].heads // self.tensor // self.heads_per_page[layer]

    @property
    def bytes(self) -> int:
        """Of the whole pool over all devices."""
        return self.data * self.tensor * self.pages * self.words * WORD_BYTES


class Pages(NamedTuple):
    """The page table of R requests, as `CacheIO` wants it."""

    tokens: Int[AnyArray, "R layers token_pages"]
    states: Int[AnyArray, "R state_pages"]
    """All state layers' pages side by side, in layer order."""


def head_words(cache: StateCache) -> int:
    """uint32 words of one head: state and tail."""
    return cache.state[0] * cache.state[1] + cache.tail[0] * cache.tail[1]


def make_layout(
    spec: CacheSpec, *, data: int, tensor: int, sequences: int, max_context: int
) -> Layout:
    """A pool for `sequences` sequences of `max_context` tokens, split over `data` shards.

    Raises ValueError where heads or sequences do not divide over the mesh, or where `max_context`
    is not a multiple of 64.
    """
    if max_context % CHUNK:
        raise ValueError(f"max_context must be a multiple of {CHUNK}, got {max_context}")
    if sequences % data:
        raise ValueError(f"{sequences} sequences do not divide over data = {data}")
    for cache in spec.states:
        if cache.heads % tensor:
            raise ValueError(f"{cache.heads} heads do not divide over tensor = {tensor}")
    words = max(
        [CHUNK * cache.width for cache in spec.tokens] + [head_words(c) for c in spec.states]
    )
    heads = tuple(_heads_per_page(cache, tensor, words) for cache in spec.states)
    layout = Layout(spec, data, tensor, 0, words, heads, max_context // CHUNK)
    return layout._replace(pages=1 + sequences // data * layout.pages_per_sequence)


def _heads_per_page(cache: StateCache, tensor: int, words: int) -> int:
    local, fit = cache.heads // tensor, words // head_words(cache)
    return max(n for n in range(1, local + 1) if local % n == 0 and n <= fit)


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Each device holds its own pages."""
    return NamedSharding(mesh, PartitionSpec(DATA, TENSOR))


def make_pool(layout: Layout, mesh: Mesh) -> Pool:
    """A pool of zeros on the mesh."""
    shape = (layout.data, layout.tensor, layout.pages, layout.words)
    return jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=pool_sharding(mesh))()


def cache_io(layout: Layout, mesh: Mesh) -> CacheIO:
    """The read and write functions of this pool, each local to a device by `shard_map`."""
    rows, pool = PartitionSpec(DATA), PartitionSpec(DATA, TENSOR)
    heads = PartitionSpec(DATA, TENSOR)

    def local(function, in_specs, out_specs):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def read_tokens(pool_: Pool, pages: Pages, layer: int) -> Array:
        width = layout.spec.tokens[layer].width

        def read(bits: Array, table: Array) -> Array:
            got = bits[0, 0][table, : CHUNK * width]
            return _floats(got).reshape(table.shape[0], -1, width)

        return local(read, (pool, rows), rows)(pool_, pages.tokens[:, layer])

    def write_tokens(
        pool_: Pool, pages: Pages, layer: int, positions: Array, n_valid: Array, values: Array
    ) -> Pool:
        write = local(_write_tokens, (pool, rows, rows, rows, rows), pool)
        return write(pool_, pages.tokens[:, layer], positions, n_valid, values)

    def read_state(pool_: Pool, pages: Pages, layer: int) -> tuple[Array, Array]:
        cache, per_page = layout.spec.states[layer], layout.heads_per_page[layer]

        def read(bits: Array, table: Array) -> tuple[Array, Array]:
            got = bits[0, 0][table, : per_page * head_words(cache)]
            flat = _floats(got).reshape(table.shape[0], -1, head_words(cache))
            state, tail = jnp.split(flat, [cache.state[0] * cache.state[1]], axis=-1)
            shape = flat.shape[:2]
            return state.reshape(*shape, *cache.state), tail.reshape(*shape, *cache.tail)

        return local(read, (pool, rows), (heads, heads))(pool_, _state_table(layout, pages, layer))

    def write_state(
        pool_: Pool, pages: Pages, layer: int, n_valid: Array, state: Array, tail: Array
    ) -> Pool:
        per_page = layout.heads_per_page[layer]

        def write(bits: Array, table: Array, n: Array, state: Array, tail: Array) -> Array:
            flat = [state.reshape(*state.shape[:2], -1), tail.reshape(*tail.shape[:2], -1)]
            values = jnp.concatenate(flat, axis=-1)
            values = values.reshape(table.size, per_page * values.shape[-1])
            table = jnp.where(n[:, None] > 0, table, NULL_PAGE).reshape(-1)
            start = jnp.zeros_like(table)
            return _scatter(bits, table, start, values)

        write = local(write, (pool, rows, rows, heads, heads), pool)
        return write(pool_, _state_table(layout, pages, layer), n_valid, state, tail)

    return CacheIO(read_tokens, write_tokens, read_state, write_state)


def clear_pages(pool: Pool, shard: Array, pages: Int[Array, "n"]) -> Pool:
    """Zeroes `pages` of one data shard; used on pages that a failed row may have poisoned."""
    return pool.at[shard, :, pages].set(np.uint32(0))


def _state_table(layout: Layout, pages: Pages, layer: int) -> Array:
    counts = [layout.state_pages(i) for i in range(layer + 1)]
    start = sum(counts[:-1])
    return jnp.asarray(pages.states)[:, start : start + counts[-1]]


def _floats(bits: Array) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _write_tokens(
    bits: Array, table: Array, positions: Array, n_valid: Array, values: Array
) -> Array:
    rows, n, width = values.shape
    at = positions[:, None] + jnp.arange(n, dtype=positions.dtype)
    page = jnp.take_along_axis(table, jnp.clip(at // CHUNK, 0, table.shape[1] - 1), axis=1)
    page = jnp.where(jnp.arange(n) < n_valid[:, None], page, NULL_PAGE)
    start = at % CHUNK * width
    return _scatter(bits, page.reshape(-1), start.reshape(-1), values.reshape(rows * n, width))


def _scatter(bits: Array, pages: Array, starts: Array, values: Float[Array, "N w"]) -> Array:
    """Writes window i of `values` at word starts[i] of page pages[i]."""
    words = jax.lax.bitcast_convert_type(values, jnp.uint32)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    where = jnp.stack([pages, starts], axis=1)
    updated = jax.lax.scatter(
        bits[0, 0], where, words, dimensions, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )
    return updated[None, None]
