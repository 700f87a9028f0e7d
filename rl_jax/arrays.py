"""[P] Array aliases and the one layout constant everything shares.

Axis names: `T` tokens of one packed row, `R` rows or requests, `L` row length, `H` heads, `K` key
width, `V` value width, `D` model width, `C` chunk.
"""

from typing import Any

import jax
import numpy as np

Array = jax.Array
AnyArray = jax.Array | np.ndarray
"""Made on the host or on a device."""
Tree = Any
"""A pytree of arrays."""

CHUNK = 64
"""Tokens per chunk, per page, and the alignment of trajectories in a packed row."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
