"""[P] Sums over the sampled tokens of each trajectory of a packed row, told to every token of it.

Forward and backward are scans in a fixed order: no scatter, so no device adds in another order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_jax.masking import first_of_segment


def segment_sum(values: Float[Array, "R L"], segments: Int[Array, "R L"]) -> Float[Array, "R L"]:
    """At every token, the sum of `values` over the run of equal `segments` that it is in."""
    first = first_of_segment(segments)

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (before, began), (value, begins) = left, right
        return jnp.where(begins, value, before + value), began | begins

    def keep(later: tuple[Array, Array], own: tuple[Array, Array]) -> tuple[Array, Array]:
        (after, _), (value, ends) = later, own
        return jnp.where(ends, value, after), later[1] | ends

    sums, _ = jax.lax.associative_scan(add, (values, first), axis=1)
    last = jnp.roll(first, -1, axis=1).at[:, -1].set(True)
    total, _ = jax.lax.associative_scan(keep, (sums, last), axis=1, reverse=True)
    return total


def segment_count(mask: Bool[Array, "R L"], segments: Int[Array, "R L"]) -> Float[Array, "R L"]:
    """At every token, how many of its trajectory's tokens `mask` selects."""
    return segment_sum(mask.astype(jnp.float32), segments)


def segment_mean(
    values: Float[Array, "R L"], mask: Bool[Array, "R L"], segments: Int[Array, "R L"]
) -> Float[Array, "R L"]:
    """At every token, the mean of `values` over what `mask` selects of its trajectory; 0 where it
    selects nothing."""
    total = segment_sum(jnp.where(mask, values, 0.0), segments)
    return total / jnp.maximum(segment_count(mask, segments), 1.0)


def segment_any(where: Bool[Array, "R L"], segments: Int[Array, "R L"]) -> Bool[Array, "R L"]:
    """At every token, whether `where` holds anywhere in its trajectory."""
    return segment_count(where, segments) > 0
