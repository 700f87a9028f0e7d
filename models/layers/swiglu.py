"""[P] Gated feed-forward layer."""

import jax
from flax import nnx
from jaxtyping import Float

from models.layers.parameters import matrix
from models.layers.parts import parts, summed
from models.layers.projection import project
from rl_jax.arrays import Array


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x) (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, out_gain: float, rngs: nnx.Rngs):
        self.gate = matrix(rngs, (width, hidden), ("embed", "mlp"), width)
        self.up = matrix(rngs, (width, hidden), ("embed", "mlp"), width)
        self.down = matrix(rngs, (hidden, width), ("mlp", "embed"), hidden, out_gain)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        count = parts(self.gate[...].shape[1], x.shape[-1])
        return summed(self, "mlp", count, SwiGLU._all, x)

    def _all(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        hidden = jax.nn.silu(project(x, self.gate[...])) * project(x, self.up[...])
        return project(hidden, self.down[...])
