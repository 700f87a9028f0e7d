"""[P] Normalisations over the last axis."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from models.layers.parameters import parameter
from rl_jax.arrays import Array


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, axis: str | None = None):
        self.scale = parameter(jnp.ones(width), (axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B width"]) -> Float[Array, "*B width"]:
        mean = jnp.mean(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt(mean + self.eps) * self.scale[...]


def l2_normalise(x: Float[Array, "*B K"], eps: float = 1e-6) -> Float[Array, "*B K"]:
    """x / sqrt(sum(x^2) + eps); zeros stay zeros."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + eps)
