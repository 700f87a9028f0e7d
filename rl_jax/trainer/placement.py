"""[H] Host batches onto a mesh that spans processes, and parameters back to the host."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.arrays import AnyArray, Tree
from rl_jax.sharding import CONTEXT, ROWS, known, replicated, whole_of
from rl_jax.trainer.batches import Batch


def place(batch: Batch, mesh: Mesh) -> Batch:
    """The batch, or one microbatch of it, for programs on `mesh`: rows and tokens over its axes.

    Every process gives the same host arrays and keeps the rows of its own devices. On a mesh of one
    process the host arrays are returned as they are.
    """
    if not mesh.is_multi_process:
        return batch

    rows = batch.tokens.ndim - 2

    def one(leaf: AnyArray) -> jax.Array:
        axes = (*(None,) * rows, ROWS, CONTEXT) if leaf.ndim else ()
        sharding = NamedSharding(mesh, known(PartitionSpec(*axes), mesh))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(one, batch)


def place_scalar(number: np.generic, mesh: Mesh) -> jax.Array | np.generic:
    """As `place`, of one number that every process gives."""
    if not mesh.is_multi_process:
        return number
    return jax.make_array_from_callback((), replicated(mesh), lambda index: np.asarray(number))


def gather(tree: Tree) -> Tree | None:
    """Host copies of global arrays in process 0, None in the others; all must call it.

    Runs collectives, so it belongs on the mesh's dispatcher. Leaf by leaf: every device holds one
    whole leaf at a time, and process 0 the whole tree on its host.
    """
    leaves, structure = jax.tree.flatten(tree)
    keep = jax.process_index() == 0
    host = []
    for leaf in leaves:
        whole = jax.block_until_ready(whole_of(leaf))
        if keep:
            host.append(np.array(whole))
    return jax.tree.unflatten(structure, host) if keep else None
