"""[P] Normalisations over the last axis, whose bits do not depend on how many rows there are,
unless a mesh cuts the tokens of a row."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from models.layers.parameters import parameter
from rl_jax.arrays import Array
from rl_jax.sharding import CONTEXT, degree


@jax.custom_vjp
def fold_sum(x: Float[Array, "*B K"]) -> Float[Array, "*B 1"]:
    """Sum over the last axis, halves added onto each other.

    The order of additions is written out: XLA picks that of a reduction by the shape of the batch,
    and a row would not come out the same alone and packed with others. Where a mesh cuts the tokens
    of a row, which ends that, the halves of so many tokens would be more than all else.
    """
    if degree(CONTEXT) > 1:
        return jnp.sum(x, -1, keepdims=True)
    rest = []
    while (width := x.shape[-1]) > 1:
        half = width // 2
        rest += [x[..., 2 * half :]] if width % 2 else []
        x = x[..., :half] + x[..., half : 2 * half]
    for odd in rest:
        x = x + odd
    return x


fold_sum.defvjp(
    lambda x: (fold_sum(x), x),
    lambda x, gradient: (jnp.broadcast_to(gradient, x.shape),),
)


def exact(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """x in float32, or in float64 where it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (arXiv 1910.07467), in float32, then x's dtype."""

    def __init__(self, width: int, eps: float, axis: str | None = None):
        self.scale = parameter(jnp.ones(width), (axis,), exact=True)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B width"]) -> Float[Array, "*B width"]:
        own, x = x.dtype, exact(x)
        mean = fold_sum(x * x) * (1.0 / x.shape[-1])
        return (x * jax.lax.rsqrt(mean + self.eps) * self.scale[...]).astype(own)


def l2_normalise(x: Float[Array, "*B K"], eps: float = 1e-6) -> Float[Array, "*B K"]:
    """x / sqrt(sum(x^2) + eps) in float32, then x's dtype; zeros stay zeros."""
    own, x = x.dtype, exact(x)
    return (x * jax.lax.rsqrt(fold_sum(x * x) + eps)).astype(own)
