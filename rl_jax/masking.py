"""[P] Segments of packed rows and the shift between hidden states and the tokens they predict."""

import jax.numpy as jnp
from jaxtyping import Bool, Int, Shaped

from rl_jax.arrays import AnyArray, Array

PADDING = -1
"""The segment id of padding."""


def next_token(tokens: Int[AnyArray, "R L"]) -> Int[Array, "R L"]:
    """The token after each token of a row; the last column holds the first token and is unused."""
    return jnp.roll(tokens, -1, axis=1)


def align_to_predicted(values: Shaped[Array, "R L"]) -> Shaped[Array, "R L"]:
    """Moves what position t - 1 says of the next token to position t; column 0 is unused."""
    return jnp.roll(values, 1, axis=1)


def first_of_segment(segment_ids: Int[AnyArray, "R L"]) -> Bool[Array, "R L"]:
    """True where a segment (or padding) begins: there no earlier token predicts this one."""
    before = jnp.concatenate([jnp.full_like(segment_ids[:, :1], -2), segment_ids[:, :-1]], axis=1)
    return segment_ids != before
