"""[P] Pages: the pool and what a page holds; `cache` reads and writes them.

The pool is uint32[data, tensor, pages, lines, 128]: raw bits in lines of 128 words, as the kernels
want them (`kernels.pages`). All pages have one size and one allocator, whatever they hold:

- a *token page* holds 64 tokens x width of one layer, one token after the other: MLA's latents, the
  same in every tensor rank, or one KV head's values and keys. Rank t of the tensor axis holds KV
  heads [t * G/T, (t + 1) * G/T) under the same page ids;
- a *state page* holds whole heads of one layer. A head begins at a multiple of 8 lines: its state
  [K, V], then from the next whole line its convolution tail. Rank t of the tensor axis holds heads
  [t * H/T, (t + 1) * H/T) under the same page id, so a head's bytes are self-contained and another
  tensor degree is a re-layout of whole heads.

Page 0 is the null page: idle rows and padding write there and nobody reads it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from rl_jax.arrays import CHUNK, AnyArray, round_up
from rl_jax.kernels.pages import LANES, TILE, lines_of
from rl_jax.model import CacheSpec, StateCache
from rl_jax.sharding import DATA, TENSOR

WORD_BYTES = 4

Pool = UInt32[Array, "data tensor pages lines 128"]


class Layout(NamedTuple):
    """Sizes of one pool, a pure function of the model's cache and the mesh."""

    spec: CacheSpec
    data: int
    tensor: int
    pages: int
    """Per data shard, the null page included."""
    lines: int
    """Of a page, each of 128 uint32 words."""
    heads_per_page: tuple[int, ...]
    """Per state layer."""
    token_pages: int
    """Token pages a sequence has per token layer: its longest context / 64."""

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence at the longest context, all layers together."""
        states = sum(self.state_pages(layer) for layer in range(len(self.spec.states)))
        return states + self.token_pages * self.token_caches

    @property
    def token_caches(self) -> int:
        """KV heads of all token layers in one tensor rank: each has pages of its own."""
        return sum(self.token_heads(layer) for layer in range(len(self.spec.tokens)))

    def token_heads(self, layer: int) -> int:
        """KV heads of one token layer in one tensor rank; a single one is in every rank."""
        return -(-self.spec.tokens[layer].heads // self.tensor)

    def state_pages(self, layer: int) -> int:
        """Pages of one sequence's state in one layer, per tensor rank."""
        return self.spec.states[layer].heads // self.tensor // self.heads_per_page[layer]

    @property
    def bytes(self) -> int:
        """Of the whole pool over all devices."""
        return int(np.prod(self.shape)) * WORD_BYTES

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the whole pool."""
        return self.data, self.tensor, self.pages, self.lines, LANES


class Pages(NamedTuple):
    """The page table of R requests, as `CacheIO` wants it."""

    tokens: Int[AnyArray, "R token_caches token_pages"]
    """All token layers' KV heads one after the other, in layer order."""
    states: Int[AnyArray, "R state_pages"]
    """All state layers' pages side by side, in layer order."""


def head_lines(cache: StateCache) -> int:
    """Lines of one head, state and tail: where the next one begins."""
    return round_up(tail_line(cache) + lines_of(cache.tail[0] * cache.tail[1]), TILE)


def tail_line(cache: StateCache) -> int:
    """Where in a head its tail begins."""
    return lines_of(cache.state[0] * cache.state[1])


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
    for cache in spec.tokens:
        if cache.heads > 1 and cache.heads % tensor:
            raise ValueError(f"{cache.heads} KV heads do not divide over tensor = {tensor}")
    lines = max(
        [round_up(lines_of(CHUNK * cache.width), TILE) for cache in spec.tokens]
        + [head_lines(cache) for cache in spec.states]
    )
    heads = tuple(_heads_per_page(cache, tensor, lines) for cache in spec.states)
    layout = Layout(spec, data, tensor, 0, lines, heads, max_context // CHUNK)
    return layout._replace(pages=1 + sequences // data * layout.pages_per_sequence)


def _heads_per_page(cache: StateCache, tensor: int, lines: int) -> int:
    local, fit = cache.heads // tensor, lines // head_lines(cache)
    return max(n for n in range(1, local + 1) if local % n == 0 and n <= fit)


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Each device holds its own pages."""
    return NamedSharding(mesh, PartitionSpec(DATA, TENSOR))


def make_pool(layout: Layout, mesh: Mesh) -> Pool:
    """A pool of zeros on the mesh."""
    zeros = jax.jit(lambda: jnp.zeros(layout.shape, jnp.uint32), out_shardings=pool_sharding(mesh))
    return zeros()


def clear_pages(pool: Pool, shard: Array, pages: Int[Array, "n"]) -> Pool:
    """Zeroes `pages` of one data shard; used on pages that a failed row may have poisoned."""
    return pool.at[shard, :, pages].set(np.uint32(0))
