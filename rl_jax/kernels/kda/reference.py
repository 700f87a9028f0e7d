"""[P] Kimi delta attention, one token at a time: the oracle for values and gradients.

In float64 when its inputs are. Knows nothing of chunks, rows or padding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array


def recurrent(
    q: Float[Array, "L H K"],
    k: Float[Array, "L H K"],
    v: Float[Array, "L H V"],
    g: Float[Array, "L H K"],
    beta: Float[Array, "L H"],
    state: Float[Array, "H K V"] | None = None,
) -> tuple[Float[Array, "L H V"], Float[Array, "H K V"]]:
    """Outputs and final state of one sequence (arXiv 2510.26692, eq. 1 with a per-channel decay).

    `S <- Diag(exp g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q / sqrt K`; q and k come
    L2-normalised, g <= 0 in natural log.
    """
    heads, width = q.shape[1:]
    if state is None:
        state = jnp.zeros((heads, width, v.shape[-1]), q.dtype)

    def step(state, token):
        q, k, v, g, beta = token
        state = state * jnp.exp(g)[..., None]
        update = beta[..., None] * (v - jnp.einsum("hkv,hk->hv", state, k))
        state = state + k[..., None] * update[:, None]
        return state, jnp.einsum("hkv,hk->hv", state, q) * width**-0.5

    final, out = jax.lax.scan(step, state, (q, k, v, g, beta))
    return out, final
