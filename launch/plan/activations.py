"""[N] What a forward pass keeps for its gradients, read off the shapes that tracing gives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl_jax.arrays import Tree
from rl_jax.model import Model

LONGEST = 4096
"""Tokens of the row that is traced; what is kept grows with the tokens and nothing else."""


class Kept(NamedTuple):
    """Bytes for one token."""

    whole: float
    """Of the width of what layers hand on, so the same on every device of `tensor`."""
    cut: float
    """Of heads and hidden widths, which `tensor` cuts."""

    def on(self, tensor: int) -> float:
        return self.whole + self.cut / tensor


def kept(model: Model, params: Tree, row_length: int) -> Kept:
    """For one token of a row; `params` are abstract. Parameters that are kept are not counted."""
    length = min(row_length, LONGEST)
    one, two = _residuals(model, params, 1, length), _residuals(model, params, 2, length)
    return Kept(*((b - a) / length for a, b in zip(one, two, strict=True)))


def _residuals(model: Model, params: Tree, rows: int, length: int) -> Kept:
    """Bytes of everything that the backward pass gets, parameters and constants included."""
    row = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def run(params: Tree, tokens: Any, positions: Any, segments: Any) -> tuple[Any, Any]:
        return jax.vjp(lambda own: model.forward(own, tokens, positions, segments), params)

    hidden, pulled = jax.eval_shape(run, params, row, row, row)
    width, found = hidden.shape[-1], [0, 0]
    for leaf in jax.tree.leaves(pulled):
        if hasattr(leaf, "shape"):
            found[leaf.shape[-1:] != (width,)] += leaf.size * leaf.dtype.itemsize
    return Kept(*found)
