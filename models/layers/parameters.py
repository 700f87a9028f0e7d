"""[P] Parameters that carry their logical axes, and the one initialiser matrices share."""

from collections.abc import Sequence

import jax
from flax import nnx

from rl_jax.arrays import Array


def parameter(value: Array, axes: Sequence[str | None]) -> nnx.Param:
    """A parameter whose dimensions are named by `axes` (vocab, embed, heads, mlp, latent, None)."""
    if value.ndim != len(axes):
        raise ValueError(f"{len(axes)} axis names for a parameter of {value.ndim} dimensions")
    return nnx.Param(value, axes=tuple(axes))


def matrix(
    rngs: nnx.Rngs, shape: Sequence[int], axes: Sequence[str | None], fan_in: int, gain: float = 1.0
) -> nnx.Param:
    """Normal with standard deviation `gain / sqrt(fan_in)`."""
    return parameter(jax.random.normal(rngs.params(), shape) * (gain * fan_in**-0.5), axes)
