"""[P] Log-decays of a token from what a layer projects: bounded by a constant, or not at all."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array


def bounded_gate(
    x: Float[Array, "*B H K"],
    rate_log: Float[Array, " H"],
    bias: Float[Array, "H K"],
    lower_bound: float,
) -> Float[Array, "*B H K"]:
    """`lower_bound * sigmoid(exp(rate_log) (x + bias))`, in (lower_bound, 0); arXiv 2607.24653."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(rate_log)[:, None] * (x + bias))


def softplus_gate(
    x: Float[Array, "*B H K"], rate_log: Float[Array, " H"], bias: Float[Array, "H K"]
) -> Float[Array, "*B H K"]:
    """`-exp(rate_log) softplus(x + bias)`, without a bound; arXiv 2510.26692, sec. 4."""
    return -jnp.exp(rate_log)[:, None] * jax.nn.softplus(x + bias)
