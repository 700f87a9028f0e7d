"""[P] Gated feed-forward layer."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from models.layers.parameters import matrix
from rl_jax.arrays import Array


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, out_gain: float, rngs: nnx.Rngs):
        self.gate = matrix(rngs, (width, hidden), ("embed", "mlp"), width)
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"), width)
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), hidden, out_gain)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return jnp.dot(jax.nn.silu(jnp.dot(x, self.gate[...])) * jnp.dot(x, self.up[...]),
                       self.down[...])
