"""[P] What parameters are kept in, apart from what they are computed in.

Matrices, and what has more axes than two, are kept in the asked dtype. Vectors and scalars (norms,
biases, decays, a router's correction) stay in float32: they are a thousandth of the bytes, and a
step of 1e-3 would be lost in bfloat16's 8 bits.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rl_jax.arrays import Tree
from rl_jax.model import Model

KEPT = (jnp.float32, jnp.bfloat16)


def kept_in(tree: Tree, dtype: DTypeLike) -> Tree:
    """The parameters, matrices in `dtype` ("float32" or "bfloat16", rounded to nearest even), all
    else in float32; leaves of other dtypes than these two stay as they are."""

    def one(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype if leaf.ndim > 1 else jnp.float32) if leaf.dtype in KEPT else leaf

    return jax.tree.map(one, tree)


def widened(tree: Tree) -> Tree:
    """The tree with float32 for bfloat16: the same numbers."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def taking_any(model: Model) -> Model:
    """The same policy, of parameters kept in either dtype: it sees float32.

    XLA drops the widening where the policy rounds a weight to bfloat16 itself.
    """
    routing = model.routing
    return model._replace(
        forward=lambda params, *rest: model.forward(widened(params), *rest),
        extend=lambda params, *rest: model.extend(widened(params), *rest),
        head=lambda params, *rest: model.head(widened(params), *rest),
        routing=routing
        and routing._replace(
            forward=lambda params, *rest: routing.forward(widened(params), *rest),
            extend=lambda params, *rest: routing.extend(widened(params), *rest),
        ),
    )
