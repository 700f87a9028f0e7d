"""[P] The product of activations and a weight of any shape, with a fast backward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array


def project(
    x: Float[Array, "..."], weight: Float[Array, "..."], contracted: int = 1
) -> Float[Array, "..."]:
    """Sum over the last `contracted` axes of `x` and the first ones of `weight`, in x's dtype."""
    return _product(x, weight.astype(x.dtype), contracted)


def _contract(x: Array, weight: Array, contracted: int) -> Array:
    return jnp.tensordot(x, weight, contracted)


def _forward(x, weight, contracted):
    return _contract(x, weight, contracted), (x, weight)


def _backward(contracted, kept, gradient):
    """The barriers keep XLA from fusing what made the operands into their transposition, which on
    the CPU costs ten times the product itself."""
    x, gradient = jax.lax.optimization_barrier((kept[0], gradient))
    weight, batch = kept[1], tuple(range(x.ndim - contracted))
    features = tuple(range(contracted, weight.ndim))
    outputs = tuple(len(batch) + i for i in range(len(features)))
    into_x = jnp.tensordot(gradient, weight, (outputs, features))
    return into_x, jnp.tensordot(x, gradient, (batch, batch))


_product = jax.custom_vjp(_contract, nondiff_argnums=(2,))
_product.defvjp(_forward, _backward)
