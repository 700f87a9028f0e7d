"""[P] Rows of an embedding, wherever they lie."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import Array
from rl_jax.sharding import CONTEXT, ROWS, SHARDS, TENSOR, degree, on_each_device


def look_up(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "R L"], dtype: DTypeLike
) -> Float[Array, "R L embed"]:
    """`table[tokens]` in `dtype`.

    Left to itself XLA gathers the activations of all rows where a mesh cuts the table. Here a
    device looks up its part of the width for its group's tokens, those of one device after the
    other's, and the parts are exchanged; tokens that it does not have are zero, and added up over
    `tensor`.
    """
    parts, group = degree(TENSOR), degree(*SHARDS)
    if parts == group == 1:
        return table[tokens].astype(dtype)

    def own(table: Array, tokens: Array) -> Array:
        if parts == 1:
            return table[tokens].astype(dtype)
        tokens = tokens - jax.lax.axis_index(TENSOR) * table.shape[0]
        here = (tokens >= 0) & (tokens < table.shape[0])
        found = jnp.where(here[..., None], table[jnp.where(here, tokens, 0)], 0)
        return found.astype(dtype)

    def local(table: Array, tokens: Array) -> tuple[Array]:
        if group == 1:
            found = own(table, tokens)
        else:
            of_group = jax.lax.all_gather(tokens, SHARDS)
            found = jax.lax.map(partial(own, table), of_group)
            found = found.reshape(-1, *found.shape[2:])
            found = jax.lax.all_to_all(found, SHARDS, split_axis=0, concat_axis=2, tiled=True)
            # Or a GPU's compiler joins it with what the first norm makes of it, all in float32.
            found = jax.lax.optimization_barrier(found)
        return (jax.lax.psum(found, TENSOR) if parts > 1 else found,)

    cuts = {"embedding": PartitionSpec(TENSOR, SHARDS), "tokens": PartitionSpec(ROWS, CONTEXT)}
    return on_each_device(local, cuts, (PartitionSpec(ROWS, CONTEXT),))(table, tokens)[0]


def logits(
    table: Float[Array, "vocab embed"],
    hidden: Float[Array, "*B embed"],
    start: Int[Array, ""] | int,
    size: int,
) -> Float[Array, "*B size"]:
    """In float32, of the words [start, start + size): see `Model.head`."""
    rows = jax.lax.dynamic_slice_in_dim(table, start, size, 0).astype(hidden.dtype)
    return jnp.dot(hidden, rows.T, preferred_element_type=jnp.float32)
