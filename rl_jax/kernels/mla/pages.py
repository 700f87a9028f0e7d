"""[P] Latent attention to token pages of the pool, and writing them, in plain XLA.

Rows go one after the other, each over its own pages, which are gathered as they are folded in:
neither a context as a whole nor the scores of one are ever there, and a short row beside a long one
costs what it costs alone. Pages come in the order of positions, so a row's bits depend on nothing
but the row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import CHUNK, Array, round_up
from rl_jax.kernels.mla import online
from rl_jax.kernels.pages import NULL_PAGE, DevicePool, read_lines


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
    queries = q.reshape(-1, block, heads, key_width).swapaxes(1, 2)
    per_row = length // block

    def one(place: tuple[Array, Array]) -> Float[Array, "H C V"]:
        number, queries = place
        row, first = number // per_row, number % per_row * block
        start, valid = positions[row], n_valid[row]
        written = jnp.where(valid > first, start + valid, 0)
        here = start + first
        return _attend(queries, pool, pages[row], here, written, width, value_width, scale)

    out = jax.lax.map(one, (jnp.arange(rows * per_row, dtype=positions.dtype), queries))
    return out.swapaxes(1, 2).reshape(rows, length, heads, value_width)[:, :n]


def _attend(
    q: Float[Array, "H C W"],
    pool: DevicePool,
    pages: Int[Array, " S"],
    position: Int[Array, ""],
    written: Int[Array, ""],
    width: int,
    value_width: int,
    scale: float,
) -> Float[Array, "H C V"]:
    """A block of one row's queries, the first at `position`, over pages with `written` tokens."""
    n = q.shape[1]
    query = position + jnp.arange(n)

    def step(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        page = pages[number]
        entries = read_lines(pool, page, jnp.zeros_like(page), CHUNK * width).reshape(CHUNK, width)
        key = number * CHUNK + jnp.arange(CHUNK)
        exists = key < written
        entries = jnp.where(exists[:, None], entries, 0.0).astype(q.dtype)  # garbage may be NaN
        mask = (key <= query[:, None]) & exists
        return online.fold(carry, q, entries, mask, scale)

    used = -(-jnp.minimum(written, position + n) // CHUNK)
    out = online.finish(jax.lax.fori_loop(0, used, step, online.empty(q, value_width)))
    return out.astype(q.dtype)


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
    return jax.lax.scatter(words, where, bits, dimensions, mode=mode).reshape(pool.shape)
