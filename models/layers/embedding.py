"""[P] Rows of an embedding, wherever they lie."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from rl_jax.arrays import Array
from rl_jax.sharding import CONTEXT, FSDP, ROWS, TENSOR, degree, on_each_device


def look_up(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "R L"]
) -> Float[Array, "R L embed"]:
    """`table[tokens]`.

    Left to itself XLA gathers the activations of all rows where a mesh cuts the table. Here a
    device looks up its part of the width for its group's tokens, and the parts are exchanged;
    tokens that it does not have are zero, and added up over `tensor`.
    """
    parts, group = degree(TENSOR), degree(FSDP)
    if parts == group == 1:
        return table[tokens]

    def local(table: Array, tokens: Array) -> tuple[Array]:
        if group > 1:
            tokens = jax.lax.all_gather(tokens, FSDP, tiled=True)
        if parts == 1:
            found = table[tokens]
        else:
            tokens = tokens - jax.lax.axis_index(TENSOR) * table.shape[0]
            here = (tokens >= 0) & (tokens < table.shape[0])
            found = jnp.where(here[..., None], table[jnp.where(here, tokens, 0)], 0)
        if group > 1:
            found = jax.lax.all_to_all(found, FSDP, split_axis=0, concat_axis=2, tiled=True)
        return (jax.lax.psum(found, TENSOR) if parts > 1 else found,)

    cuts = {"embedding": PartitionSpec(TENSOR, FSDP), "tokens": PartitionSpec(ROWS, CONTEXT)}
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
