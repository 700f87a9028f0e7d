"""[P] Parameters that carry their logical axes, and the one initialiser matrices share."""

from collections.abc import Sequence

import jax
from flax import nnx

from rl_jax.arrays import Array, Tree


def parameter(value: Array, axes: Sequence[str | None], *, exact: bool = False) -> nnx.Param:
    """A parameter whose dimensions are named by `axes`.

    Names are vocab, embed, heads, kv_heads, mlp, experts, expert_mlp, latent and None. An `exact`
    one is not cast to the compute dtype.
    """
    if value.ndim != len(axes):
        raise ValueError(f"{len(axes)} axis names for a parameter of {value.ndim} dimensions")
    return nnx.Param(value, axes=tuple(axes), exact=exact)


def matrix(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    axes: Sequence[str | None],
    fan_in: int,
    gain: float = 1.0,
    *,
    exact: bool = False,
) -> nnx.Param:
    """Normal with standard deviation `gain / sqrt(fan_in)`."""
    value = jax.random.normal(rngs.params(), shape) * (gain * fan_in**-0.5)
    return parameter(value, axes, exact=exact)


def noted(state: Tree, name: str) -> Tree:
    """What `parameter` noted under "axes" or "exact": a nested dict, from an `nnx.State`."""
    found = jax.tree.map(
        lambda leaf: leaf.get_metadata(name),
        state,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.to_pure_dict(found)
