"""[P] What a mixing layer is told besides its input: the shape of packed rows, or of one step."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import CHUNK, Array
from rl_jax.model import CacheIO


class Rows(NamedTuple):
    """Packed rows of training: R rows of L tokens, N = L / 64 chunks."""

    segments: Int[Array, "R L"]
    """Trajectory number within the row, -1 on padding."""
    reset: Bool[Array, "R N"]
    """True where a chunk begins another segment than the chunk before it holds."""
    positions: Int[Array, "R L"] | None
    """Within the trajectory; None where no layer asks for them."""


class Step(NamedTuple):
    """n tokens of each of R requests, against what the pool keeps of the tokens before."""

    positions: Int[Array, " R"]
    """Position of the first of the n tokens."""
    n_valid: Int[Array, " R"]
    """How many of the n tokens count; 0 for an idle row."""
    pages: Any
    io: CacheIO
    width: int
    """The n of the caller; inputs of layers are padded beyond it."""

    def places(self, length: int) -> Int[Array, "R length"]:
        """Positions of the tokens."""
        return self.positions[:, None] + jnp.arange(length)

    def valid(self, length: int) -> Bool[Array, "R length"]:
        return jnp.arange(length) < self.n_valid[:, None]

    def fresh(self, kept: Float[Array, "R *S"]) -> Float[Array, "R *S"]:
        """What a layer kept, or zeros for a request at position 0."""
        began = (self.positions > 0).reshape(-1, *(1,) * (kept.ndim - 1))
        return jnp.where(began, kept, 0.0)


def rows_of(segments: Int[Array, "R L"], positions: Int[Array, "R L"] | None = None) -> Rows:
    """The layout of packed rows; a chunk belongs to the segment of its first token."""
    first = segments[:, ::CHUNK]
    before = jnp.pad(first, ((0, 0), (1, 0)), constant_values=-2)[:, :-1]
    return Rows(segments, first != before, positions)
