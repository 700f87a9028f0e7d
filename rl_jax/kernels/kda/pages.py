"""[P] Decode of Kimi delta attention on pool pages in plain XLA: gather, recurrence, scatter."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import Array
from rl_jax.kernels.kda.recurrent import recurrent_step
from rl_jax.kernels.pages import NULL_PAGE, DevicePool, head_places, read_lines, write_lines


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
    """A few tokens per request, one after the other; in place where the pool is donated."""
    rows, _, heads, width = q.shape
    shape = rows, heads, width, v.shape[-1]
    where, line = head_places(pages, heads, head_lines)
    state = read_lines(pool, where, line, width * v.shape[-1]).reshape(shape)
    state = jnp.where(fresh[:, None, None, None], 0.0, state)

    def step(state, token):
        number, q, k, v, g, beta = token
        out, after = recurrent_step(q, k, v, g, beta, state)
        return jnp.where((number < n_valid)[:, None, None, None], after, state), out

    tokens = (jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = jax.lax.scan(step, state, (jnp.arange(q.shape[1]), *tokens))
    where = jnp.where(n_valid[:, None] > 0, where, NULL_PAGE)
    pool = write_lines(pool, where, line, state.reshape(rows, heads, -1))
    return jnp.moveaxis(out, 0, 1).astype(v.dtype), pool
