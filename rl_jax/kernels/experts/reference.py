"""[P] A mixture of experts as its definition, all experts on all tokens, any dtype: the oracle."""

import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import Array


def mix(
    x: Float[Array, "T D"],
    choices: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
) -> Float[Array, "T D"]:
    """sum_c weights[t, c] down_e (silu(gate_e x_t) * up_e x_t), e = choices[t, c]; -1: nothing."""
    gates = jnp.einsum("td,edf->tef", x, gate)
    hidden = gates / (1 + jnp.exp(-gates)) * jnp.einsum("td,edf->tef", x, up)
    out = jnp.einsum("tef,efd->ted", hidden, down)
    chosen = choices[..., None] == jnp.arange(gate.shape[0])
    return jnp.einsum("tke,tk,ted->td", chosen.astype(x.dtype), weights, out)
