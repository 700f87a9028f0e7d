"""[P] Small arrays of R rows as one array of words.

Every array that goes to a device or comes from it has a price of its own, which for a decode step
of a small model is that of a layer.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt32

from rl_jax.arrays import Array, Tree


def pack(tree: Tree) -> UInt32[np.ndarray, "R words"]:
    """On the host: the rows of every leaf side by side; leaves hold 4 bytes a number."""
    leaves = jax.tree.leaves(tree)
    return np.concatenate([x.reshape(len(x), -1).view(np.uint32) for x in leaves], axis=1)


def unpack(words: UInt32[Array, "R words"], like: Tree) -> Tree:
    """On the device: what `pack` packed of a tree with such shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([np.prod(leaf.shape[1:], dtype=int) for leaf in leaves])
    parts = jnp.split(words, ends[:-1], axis=1)
    return structure.unflatten(
        [
            jax.lax.bitcast_convert_type(part.reshape(leaf.shape), leaf.dtype)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
    )


def pack_columns(columns: tuple[Array, ...]) -> UInt32[Array, "R columns"]:
    """On the device: one number or truth value a row and column."""
    whole = [x.astype(jnp.uint32) if x.dtype == bool else x for x in columns]
    return jnp.stack([jax.lax.bitcast_convert_type(x, jnp.uint32) for x in whole], axis=1)
