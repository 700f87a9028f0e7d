"""[P] Decode of Kimi delta attention on TPUs: a few tokens a request, in place on its state pages.

A step of the grid takes a block of a request's heads. Their states come from the pool and go back
by copies of our own: while one block is worked on, the next one comes and the last one leaves. So
rows without tokens move nothing, and fresh rows read nothing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import Array
from rl_jax.kernels.kda.pallas_tpu_chunk import VMEM_LIMIT
from rl_jax.kernels.pages import LANES, TILE, DevicePool

SLOTS = 3
"""Blocks of states on the chip: one comes, one is worked on, one leaves."""
MOST_HEADS = 16
"""Of one block: a step of the grid costs as much time as some of them."""


class Blocks(NamedTuple):
    """Where the states of block b lie: heads b % per_row * heads .. of row b // per_row."""

    pages: Any
    """[R * pages of a row], in scalar memory as the next two."""
    n_valid: Any
    fresh: Any
    pool: Any
    states: Any
    """[slots, heads, lines, 128] on the chip."""
    arrived: Any
    left: Any
    per_row: int
    heads_of_page: int
    head_lines: int

    def valid(self, block: Array) -> Array:
        return self.n_valid[block // self.per_row] > 0

    def starts_from_zero(self, block: Array) -> Array:
        return self.fresh[block // self.per_row] != 0

    def copies(self, block: Array, inwards: bool) -> list[Any]:
        """One copy a head, from the pool or to it."""
        heads, lines = self.states.shape[1:3]
        slot, first = block % SLOTS, block * heads
        made = []
        for i in range(heads):
            page = self.pages[(first + i) // self.heads_of_page]
            line = pl.multiple_of((first + i) % self.heads_of_page * self.head_lines, TILE)
            there, here = self.pool.at[page, pl.ds(line, lines)], self.states.at[slot, i]
            if inwards:
                made.append(pltpu.make_async_copy(there, here, self.arrived.at[slot]))
            else:
                made.append(pltpu.make_async_copy(here, there, self.left.at[slot]))
        return made

    def fetch(self, block: Array, exists: Array | bool = True) -> None:
        """Begins to bring a block, or clears its place."""
        here = jnp.where(exists, block, 0)
        wanted = exists & self.valid(here)

        @pl.when(wanted & ~self.starts_from_zero(here))
        def _bring():
            for copy in self.copies(here, inwards=True):
                copy.start()

        @pl.when(wanted & self.starts_from_zero(here))
        def _clear():
            self.states[here % SLOTS] = jnp.zeros(self.states.shape[1:], self.states.dtype)

    def await_fetched(self, block: Array) -> None:
        @pl.when(self.valid(block) & ~self.starts_from_zero(block))
        def _wait():
            for copy in self.copies(block, inwards=True):
                copy.wait()

    def store(self, block: Array) -> None:
        @pl.when(self.valid(block))
        def _send():
            for copy in self.copies(block, inwards=False):
                copy.start()

    def await_stored(self, block: Array) -> None:
        here = jnp.maximum(block, 0)

        @pl.when((block >= 0) & self.valid(here))
        def _wait():
            for copy in self.copies(here, inwards=False):
                copy.wait()


def _kernel(
    pages: Any, n_valid: Any, fresh: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, given: Any,
    out: Any, pool: Any, states: Any, arrived: Any, left: Any, *, per_row: int, heads_of_page: int,
    head_lines: int,
) -> None:  # fmt: skip
    """One block of heads of one row."""
    del given  # Is `pool`.
    block, count = pl.program_id(0), pl.num_programs(0)
    blocks = Blocks(
        pages, n_valid, fresh, pool, states, arrived, left, per_row, heads_of_page, head_lines
    )

    @pl.when(block == 0)
    def _begin():
        blocks.fetch(block)

    blocks.await_stored(block - (SLOTS - 1))
    blocks.fetch(block + 1, block + 1 < count)
    blocks.await_fetched(block)
    out[...] = jnp.zeros_like(out)

    def token(t, carry):
        _advance(t, (q, k, v, g, beta), out, states, block % SLOTS)
        return carry

    lax.fori_loop(0, n_valid[block // per_row], token, 0)
    blocks.store(block)

    @pl.when(block == count - 1)
    def _end():
        blocks.await_stored(block - 1)
        blocks.await_stored(block)


def _advance(t: Array, refs: tuple[Any, ...], out: Any, states: Any, slot: Array) -> None:
    """One token of a block of heads; states are [heads, K lines a part of 128 values, 128]."""
    q, k, v, g, beta = (ref[0, t].astype(jnp.float32) for ref in refs)
    heads, width = q.shape
    parts = v.shape[1] // LANES
    columns = jnp.concatenate([jnp.exp(g), k, q * width**-0.5], 0).T
    outs = []
    for head in range(heads):
        decay, key, query = (columns[:, i * heads + head, None] for i in range(3))
        of_head, lines = [], states.at[slot].at[head]
        for part in range(parts):
            at = pl.ds(part, width, stride=parts)
            state = pltpu.bitcast(lines[at], jnp.float32) * decay
            wanted = v[head : head + 1, part * LANES : (part + 1) * LANES]
            update = beta[head : head + 1] * (wanted - jnp.sum(state * key, 0, keepdims=True))
            state = state + key * update
            lines[at] = pltpu.bitcast(state, jnp.uint32)
            of_head.append(jnp.sum(state * query, 0, keepdims=True))
        outs.append(jnp.concatenate(of_head, 1))
    out[0, t] = jnp.concatenate(outs, 0).astype(out.dtype)


def decode(
    q: Float[Array, "R n H K"],
    k: Float[Array, "R n H K"],
    v: Float[Array, "R n H V"],
    g: Float[Array, "R n H K"],
    beta: Float[Array, "R n H"],
    pool: DevicePool,
    pages: Int[Array, "R P"],
    n_valid: Int[Array, " R"],
    fresh: Bool[Array, " R"],
    *,
    head_lines: int,
) -> tuple[Float[Array, "R n H V"], DevicePool]:
    """A few tokens per request, in place where the pool is donated; see `api.decode`.

    Rows without valid tokens write nowhere. Outputs past `n_valid` are zeros.
    """
    rows, count, heads, width = q.shape
    value_width = v.shape[-1]
    together = next((n for n in (MOST_HEADS, 8) if heads % n == 0), heads)
    per_row, lines = heads // together, width * value_width // LANES

    def tokens(width):
        index = lambda b, *_: (b // per_row, 0, b % per_row, 0)  # noqa: E731
        return pl.BlockSpec((1, count, together, width), index)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = pages.reshape(-1), n_valid, fresh
    scalars = [x.astype(jnp.int32) for x in scalars]
    operands = [*scalars, q, k, v, g, beta[..., None], pool]
    out, pool = pl.pallas_call(
        partial(
            _kernel,
            per_row=per_row,
            heads_of_page=heads // pages.shape[1],
            head_lines=head_lines,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows * per_row,),
            in_specs=[*map(tokens, (width, width, value_width, width, 1)), anywhere],
            out_specs=[tokens(value_width), anywhere],
            scratch_shapes=[
                pltpu.VMEM((SLOTS, together, lines, LANES), jnp.uint32),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SemaphoreType.DMA((SLOTS,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="kda_decode",
    )(*operands)
    return out, pool
