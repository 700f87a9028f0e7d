"""[P] Kimi delta attention one token after the other: decode, and what is too short for a chunk."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array

SHORT = 16
"""Up to so many tokens at once, one after the other is faster than a chunk."""


def recurrent_step(
    q: Float[Array, "R H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H V"],
    g: Float[Array, "R H K"],
    beta: Float[Array, "R H"],
    state: Float[Array, "R H K V"],
) -> tuple[Float[Array, "R H V"], Float[Array, "R H K V"]]:
    """One token per request, the recurrence of `reference.recurrent`."""
    state = state * jnp.exp(g)[..., None]
    update = beta[..., None] * (v - jnp.sum(state * k[..., None], -2))
    state = state + k[..., None] * update[..., None, :]
    return jnp.sum(state * q[..., None], -2) * q.shape[-1] ** -0.5, state


def recurrent(
    q: Float[Array, "R n H K"],
    k: Float[Array, "R n H K"],
    v: Float[Array, "R n H V"],
    g: Float[Array, "R n H K"],
    beta: Float[Array, "R n H"],
    state: Float[Array, "R H K V"],
) -> tuple[Float[Array, "R n H V"], Float[Array, "R H K V"]]:
    """A few tokens per request, one after the other."""

    def step(state, token):
        q, k, v, g, beta = token
        out, state = recurrent_step(q, k, v, g, beta, state)
        return state, out

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state
