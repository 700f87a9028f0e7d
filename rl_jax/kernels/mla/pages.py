"""[P] Latent attention to token pages of the pool, and writing them, in plain XLA.

Pages are gathered as they are folded in (`walk`), so neither a context as a whole nor the scores of
one are ever there, and a row pays for its own pages. Pages come in the order of positions, so a
row's bits depend on nothing but the row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import CHUNK, Array, round_up
from rl_jax.kernels.mla.walk import Entries, Lanes, walk
from rl_jax.kernels.pages import NULL_PAGE, DevicePool


def attend_pages(
    q: Float[Array, "R n H W"],
    pool: DevicePool,
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    *,
    width: int,
    value_width: int,
    scale: float,
) -> Float[Array, "R n H V"]:
    """Causal attention of n tokens per request to pages that already hold them.

    In blocks of 64 queries and 64 keys, as `attend_rows`. A token has `width` numbers, of which the
    last W are its key.
    """
    rows, n, heads, key_width = q.shape
    block = min(n, CHUNK)
    length = round_up(n, block)
    q = jnp.pad(q, ((0, 0), (0, length - n), (0, 0), (0, 0)))
    starts = jnp.arange(0, length, block, dtype=positions.dtype)
    written = jnp.where(n_valid[:, None] > starts, (positions + n_valid)[:, None], 0)
    lanes = Lanes(
        q.reshape(-1, block, heads, key_width).swapaxes(1, 2),
        jnp.repeat(jnp.arange(rows, dtype=pages.dtype), len(starts)),
        (positions[:, None] + starts).reshape(-1),
        written.reshape(-1),
    )
    out = walk(lanes, Entries(pool, pages, width, value_width, scale)).astype(q.dtype)
    return out.swapaxes(1, 2).reshape(rows, length, heads, value_width)[:, :n]


def write_pages(
    pool: DevicePool,
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    values: Float[Array, "R n W"],
) -> DevicePool:
    """Writes n tokens per request, the first at `positions`; in place where the pool is donated.

    Pages hold float32, whatever `values` are. Tokens begin anywhere in a line, so the pool is seen
    as words: free but on a TPU.
    """
    n, width = values.shape[1:]
    at = positions[:, None] + jnp.arange(n, dtype=positions.dtype)
    page = jnp.take_along_axis(pages, jnp.clip(at // CHUNK, 0, pages.shape[1] - 1), axis=1)
    page = jnp.where(jnp.arange(n) < n_valid[:, None], page, NULL_PAGE)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    where = jnp.stack([page, (at % CHUNK * width).astype(page.dtype)], -1)
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    words = pool.reshape(pool.shape[0], -1)
    written = jax.lax.scatter(words, where, bits, dimensions, mode=mode).reshape(pool.shape)
    # Of one token the scatter is an update of a slice, which a GPU's compiler would make again
    # where the pool is read next, and for that keep a copy of the pool as it was.
    return jax.lax.optimization_barrier(written)
