"""[P] The short convolution written as its definition, one sequence, any dtype: the oracle."""

import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array


def short_conv(x: Float[Array, "L C"], weight: Float[Array, "taps C"]) -> Float[Array, "L C"]:
    """y_t = silu(sum_d weight[taps - 1 - d] x[t - d]), inputs before the first are zero."""
    taps = weight.shape[0]
    rows = [
        sum((weight[taps - 1 - d] * x[t - d] for d in range(min(taps, t + 1))), 0 * x[0])
        for t in range(x.shape[0])
    ]
    out = jnp.stack(rows)
    return out / (1 + jnp.exp(-out))
