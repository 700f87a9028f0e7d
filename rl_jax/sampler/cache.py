"""[P] `CacheIO` over the pool: the only functions that read and write pages.

Each is local to a device by `shard_map`: rows over data, heads over tensor, kernels see one
device's pool.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Int

from rl_jax.arrays import Array
from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.mla import api as mla
from rl_jax.kernels.pages import NULL_PAGE, head_places, read_lines, write_lines
from rl_jax.model import CacheIO
from rl_jax.sampler.layout import Layout, Pages, Pool, head_lines, tail_line
from rl_jax.sharding import DATA, TENSOR

ROWS, POOL, HEADS = PartitionSpec(DATA), PartitionSpec(DATA, TENSOR), PartitionSpec(DATA, TENSOR)
HEADS_OF_TOKENS = PartitionSpec(DATA, None, TENSOR)


def cache_io(layout: Layout, mesh: Mesh) -> CacheIO:
    """The functions of this pool."""
    paged = _Paged(layout, mesh)
    return CacheIO(
        paged.write_tokens,
        paged.attend,
        paged.advance,
        paged.read_state,
        paged.write_state,
        paged.read_tail,
        paged.write_tail,
    )


class _Paged(NamedTuple):
    layout: Layout
    mesh: Mesh

    def write_tokens(
        self, pool: Pool, pages: Pages, layer: int, positions: Array, n_valid: Array, values: Array
    ) -> Pool:
        def write(bits: Array, table: Array, at: Array, n: Array, values: Array) -> Array:
            table, at, n = _by_head(table, at, n)
            values = values.swapaxes(1, 2).reshape(len(table), *values.shape[1::2])
            return mla.write_pages(bits[0, 0], table, at, n, values)[None, None]

        heads = HEADS_OF_TOKENS if self.layout.spec.tokens[layer].heads > 1 else ROWS
        run = self._local(write, POOL, ROWS, ROWS, ROWS, heads, out=POOL)
        return run(pool, self._tokens(pages, layer), positions, n_valid, values)

    def attend(
        self,
        pool: Pool,
        pages: Pages,
        layer: int,
        q: Array,
        positions: Array,
        n_valid: Array,
        value_width: int,
        scale: float,
    ) -> Array:
        shape = {"value_width": value_width, "scale": scale}
        shape["width"] = self.layout.spec.tokens[layer].width

        def attend(q: Array, bits: Array, table: Array, at: Array, n: Array) -> Array:
            (rows, tokens, heads, width), groups = q.shape, table.shape[1]
            q = q.reshape(rows, tokens, groups, heads // groups, width).swapaxes(1, 2)
            q = q.reshape(-1, tokens, heads // groups, width)
            out = mla.attend_pages(q, bits[0, 0], *_by_head(table, at, n), **shape)
            out = out.reshape(rows, groups, tokens, heads // groups, value_width)
            return out.swapaxes(1, 2).reshape(rows, tokens, heads, value_width)

        run = self._local(attend, HEADS_OF_TOKENS, POOL, ROWS, ROWS, ROWS, out=HEADS_OF_TOKENS)
        return run(q, pool, self._tokens(pages, layer), positions, n_valid)

    def advance(
        self,
        pool: Pool,
        pages: Pages,
        layer: int,
        positions: Array,
        n_valid: Array,
        operands: tuple[Array, ...],
    ) -> tuple[Array, Pool]:
        lines = head_lines(self.layout.spec.states[layer])

        def decode(bits: Array, table: Array, at: Array, n: Array, *operands: Array):
            q, k, v, g, beta = operands
            fresh = at == 0
            out, own = kda.decode(q, k, v, g, beta, bits[0, 0], table, n, fresh, head_lines=lines)
            return out, own[None, None]

        run = self._local(
            decode, POOL, ROWS, ROWS, ROWS, *(HEADS_OF_TOKENS,) * 5, out=(HEADS_OF_TOKENS, POOL)
        )
        return run(pool, self._states(pages, layer), positions, n_valid, *operands)

    def read_state(self, pool: Pool, pages: Pages, layer: int) -> Array:
        return self._read(pool, pages, layer, 0, self.layout.spec.states[layer].state)

    def write_state(
        self, pool: Pool, pages: Pages, layer: int, n_valid: Array, state: Array
    ) -> Pool:
        return self._write(pool, pages, layer, 0, n_valid, state)

    def read_tail(self, pool: Pool, pages: Pages, layer: int) -> Array:
        cache = self.layout.spec.states[layer]
        return self._read(pool, pages, layer, tail_line(cache), cache.tail)

    def write_tail(self, pool: Pool, pages: Pages, layer: int, n_valid: Array, tail: Array) -> Pool:
        cache = self.layout.spec.states[layer]
        return self._write(pool, pages, layer, tail_line(cache), n_valid, tail)

    def _read(
        self, pool: Pool, pages: Pages, layer: int, line: int, shape: tuple[int, int]
    ) -> Array:
        """float32[R, H, *shape] from `line` of every head on."""

        def read(bits: Array, table: Array) -> Array:
            where, start = self._places(layer, table)
            got = read_lines(bits[0, 0], where, start, shape[0] * shape[1], line)
            return got.reshape(*where.shape, *shape)

        return self._local(read, POOL, ROWS, out=HEADS)(pool, self._states(pages, layer))

    def _write(
        self, pool: Pool, pages: Pages, layer: int, line: int, n_valid: Array, value: Array
    ) -> Pool:
        """What `_read` reads."""

        def write(bits: Array, table: Array, n: Array, value: Array) -> Array:
            where, start = self._places(layer, table)
            where = jnp.where(n[:, None] > 0, where, NULL_PAGE)
            flat = value.reshape(*where.shape, -1)
            return write_lines(bits[0, 0], where, start, flat, line)[None, None]

        write = self._local(write, POOL, ROWS, ROWS, HEADS, out=POOL)
        return write(pool, self._states(pages, layer), n_valid, value)

    def _local(
        self, function: Callable, *specs: PartitionSpec, out: PartitionSpec | tuple
    ) -> Callable:
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False
        )

    def _tokens(self, pages: Pages, layer: int) -> Array:
        counts = [self.layout.token_heads(i) for i in range(layer + 1)]
        start = sum(counts[:-1])
        return jnp.asarray(pages.tokens)[:, start : start + counts[-1]]

    def _states(self, pages: Pages, layer: int) -> Array:
        counts = [self.layout.state_pages(i) for i in range(layer + 1)]
        start = sum(counts[:-1])
        return jnp.asarray(pages.states)[:, start : start + counts[-1]]

    def _places(self, layer: int, table: Array) -> tuple[Array, Array]:
        """(page, first line) of each head of one device's rows."""
        count = table.shape[1] * self.layout.heads_per_page[layer]
        return head_places(table, count, head_lines(self.layout.spec.states[layer]))


def _by_head(
    table: Int[Array, "R G S"], at: Int[Array, " R"], n: Int[Array, " R"]
) -> tuple[Int[Array, "R*G S"], Int[Array, " R*G"], Int[Array, " R*G"]]:
    """Each request's KV heads as requests of their own, side by side."""
    rows, heads, _ = table.shape
    at, n = (jnp.broadcast_to(x[:, None], (rows, heads)).reshape(-1) for x in (at, n))
    return table.reshape(rows * heads, -1), at, n
