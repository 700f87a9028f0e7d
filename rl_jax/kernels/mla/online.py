"""[P] The online softmax of attention in blocks of keys (arXiv 2205.14135, alg. 1).

Of one row: `empty`, then `fold` for every block of keys, then `finish`. A block masked out whole
changes no bit of what is carried, so neither packing nor cuts of the keys do.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from rl_jax.arrays import Array

KEPT = "attention"
"""Name of what a forward pass hands its backward pass (`jax.ad_checkpoint.checkpoint_name`): who
keeps it does not attend again."""
LOWEST = -1e30
"""Stands for minus infinity in running maxima: differences of it stay numbers."""


def accumulator(dtype: DTypeLike) -> DTypeLike:
    """What sums of products of such operands are kept in: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def empty(q: Float[Array, "H L W"], value_width: int) -> tuple[Array, Array]:
    """What is carried before the first block: peak [H, L, 1], total [H, L, V + 1]."""
    dtype = accumulator(q.dtype)
    peak = jnp.full((*q.shape[:2], 1), LOWEST, dtype)
    return peak, jnp.zeros((*q.shape[:2], value_width + 1), dtype)


def with_mass(values: Float[Array, "*B V"]) -> Float[Array, "*B V+1"]:
    """Values and a column of ones, whose weighted sum is the mass."""
    return jnp.concatenate([values, jnp.ones_like(values[..., :1])], -1)


def scores(q: Float[Array, "H L W"], keys: Float[Array, "*own C W"]) -> Float[Array, "H L C"]:
    """q . k of every pair; keys of their own per head, or one for all heads."""
    heads = "h" if keys.ndim == 3 else ""
    kind = accumulator(q.dtype)
    return jnp.einsum(f"hlw,{heads}cw->hlc", q, keys, preferred_element_type=kind)


def weighted(
    weights: Float[Array, "H L C"], values: Float[Array, "*own C V"]
) -> Float[Array, "H L V"]:
    """Sums of values by weights; values of their own per head, or one for all heads."""
    heads = "h" if values.ndim == 3 else ""
    kind = accumulator(values.dtype)
    weights = weights.astype(values.dtype)
    return jnp.einsum(f"hlc,{heads}cv->hlv", weights, values, preferred_element_type=kind)


def fold_values(
    carry: tuple[Array, Array],
    q: Float[Array, "H L W"],
    keys: Float[Array, "*own C W"],
    values: Float[Array, "*own C V1"],
    mask: Bool[Array, "L C"],
    scale: float,
) -> tuple[Array, Array]:
    """One step over a block of C keys: (peak, weighted values | mass).

    `values` come from `with_mass`: one product makes sums and mass in one order. Scores are scaled,
    not queries, which in bfloat16 would be rounded once more.
    """
    peak, total = carry
    found = jnp.where(mask, scores(q, keys) * scale, LOWEST)
    higher = jnp.maximum(peak, found.max(-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(found - higher), 0.0)
    return higher, total * jnp.exp(peak - higher) + weighted(weights, values)


def fold(
    carry: tuple[Array, Array],
    q: Float[Array, "H L W"],
    entries: Float[Array, "C E"],
    mask: Bool[Array, "L C"],
    scale: float,
) -> tuple[Array, Array]:
    """`fold_values` over entries that all heads share: the last W numbers of one are its key, the
    first V its value."""
    values = with_mass(entries[..., : carry[1].shape[-1] - 1])
    keys = entries[..., entries.shape[-1] - q.shape[-1] :]
    return fold_values(carry, q, keys, values, mask, scale)


def finish(carry: tuple[Array, Array]) -> Float[Array, "H L V"]:
    """Weighted means of the values; zeros where no key was visible."""
    total, mass = carry[1][..., :-1], carry[1][..., -1:]
    return total / jnp.where(mass > 0, mass, 1.0)


def log_mass(carry: tuple[Array, Array]) -> Float[Array, "H L 1"]:
    """Logarithm of the sum of exp(score): what makes a pair's weight again in a backward pass."""
    mass = carry[1][..., -1:]
    return carry[0] + jnp.log(jnp.where(mass > 0, mass, 1.0))
