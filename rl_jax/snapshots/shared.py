"""[H] A version that all processes of a world write, each its own part.

Collectives, so all processes call these in one order, on the mesh's dispatcher. Whoever calls them
in process 0 makes the version's directory first and seals it afterwards (`SnapshotStore`).
"""

from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from rl_jax.arrays import Tree
from rl_jax.sharding import whole_of
from rl_jax.snapshots.manifest import Leaf, describe, named_leaves
from rl_jax.snapshots.store import saving


def describe_shared(tree: Tree) -> dict[str, Leaf]:
    """What a manifest says of every leaf, in process 0; nothing elsewhere.

    Leaf by leaf: every device, and the host of process 0, hold one whole leaf at a time.
    """
    leaves = {}
    for name, leaf in named_leaves(tree).items():
        whole = jax.block_until_ready(whole_of(leaf))
        if jax.process_index() == 0:
            leaves[name] = describe(np.asarray(whole))
    return leaves


def save_shared(path: Path, tree: Tree) -> None:
    """Writes the leaves under `path`, a new directory in one that is there."""
    with saving(path):
        ocp.save(str(path.absolute()), named_leaves(tree))
