"""[P] The experts of one device: tokens sorted by expert, one grouped product per matrix.

Sorting copies each token once for each of its choices. The way there and back are gathers in both
directions, so nothing is added in an order that depends on neighbours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
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
    product: Callable[[Any, Array, Array], Array],
) -> Float[Array, "T D"]:
    """`reference.mix` in the dtype of x; a choice that is no expert of these adds nothing.

    `product(rows, matrices, sizes)` multiplies each group's rows, the first sizes[0] and so on, by
    the group's matrix; what it leaves in rows past the groups may be anything, also in gradients.
    """
    experts, chosen = gate.shape[0], choices.shape[1]
    flat = choices.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(flat, stable=True)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(flat, length=experts).astype(jnp.int32)
    here = flat < experts
    rows = _sorted(x, order, inverse, here, chosen)
    hidden = jax.nn.silu(product(rows, gate, sizes)) * product(rows, up, sizes)
    out = _unsorted(product(hidden, down, sizes), order, inverse)
    out = jnp.where(here[:, None], out, 0).reshape(*choices.shape, -1)
    exact = jnp.promote_types(x.dtype, weights.dtype)
    terms = [out[:, i].astype(exact) * weights[:, i, None].astype(exact) for i in range(chosen)]
    return sum(terms[1:], terms[0]).astype(x.dtype)


def grouped(
    rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Each group's rows by the group's matrix."""
    return jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sorted(x: Array, order: Array, inverse: Array, here: Array, chosen: int) -> Array:
    """Each token once for each of its choices, in `order`; `here` are those that count."""
    return x[order // chosen]


def _sorted_backward(chosen: int, kept: tuple[Array, Array], gradient: Array):
    inverse, here = kept
    copies = jnp.where(here[:, None], gradient[inverse], 0).reshape(-1, chosen, gradient.shape[-1])
    return sum((copies[:, i] for i in range(1, chosen)), copies[:, 0]), None, None, None


_sorted.defvjp(
    lambda x, order, inverse, here, chosen: (x[order // chosen], (inverse, here)), _sorted_backward
)


@jax.custom_vjp
def _unsorted(x: Array, order: Array, inverse: Array) -> Array:
    """Rows in `order` back at their places."""
    return x[inverse]


_unsorted.defvjp(
    lambda x, order, inverse: (x[inverse], order),
    lambda order, gradient: (gradient[order], None, None),
)
