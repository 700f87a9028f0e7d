# pyright: reportMissingImports=false
"""[P] Calls the Triton kernels of grouped products from jax, forward and backward.

Imports Triton only when a kernel is called. A call is opaque to XLA's partitioner: it is made under
`shard_map`, where a group of devices has more than one.
"""

from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import Array

DTYPES = ("float32", "bfloat16")


class Launch(NamedTuple):
    """Block sizes on an H200, chosen from what the compiler reports, not from timings."""

    rows: int
    columns: int
    """Of what is written."""
    summed: int
    """Numbers added up at once; of `groups_product` rows, and `rows` are of a matrix there."""
    warps: int
    stages: int


def _launch(dtype: DTypeLike) -> Launch:
    return Launch(128, 128, 64, 8, 3) if dtype == jnp.bfloat16 else Launch(64, 64, 32, 4, 2)


def obstacle(dtype: DTypeLike) -> str:
    """Why the kernels cannot run such operands here; empty where they can."""
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (`make setup-gpu`)"
    if jax.default_backend() != "gpu":
        return f"jax's default backend is {jax.default_backend()}, not gpu"
    name = jnp.dtype(dtype).name
    return "" if name in DTYPES else f"{name} is not one of {', '.join(DTYPES)}"


@jax.custom_vjp
def grouped(
    rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """As in `xla`: each group's rows, the first sizes[0] and so on, by the group's matrix."""
    return _rows(rows, matrices, sizes, turned=False)


def _forward(rows, matrices, sizes):
    return grouped(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(kept, slopes):
    rows, matrices, sizes = kept
    return _rows(slopes, matrices, sizes, turned=True), _groups(rows, slopes, sizes), None


grouped.defvjp(_forward, _backward)


def _rows(rows: Array, matrices: Array, sizes: Array, turned: bool) -> Array:
    """Times the matrices or, where `turned`, their transposes."""
    launch = _launch(rows.dtype)
    summed, width = matrices.shape[:0:-1] if turned else matrices.shape[1:]
    groups, first, end = tiles(sizes, rows.shape[0], launch.rows)
    along = (1, summed) if turned else (width, 1)
    names = dict(zip(("ALONG_K", "ALONG_N"), along, strict=True)) | {"K": summed, "N": width}
    shape = jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype)
    operands, grid = (rows, matrices, groups, first, end), (-(-width // launch.columns), len(first))
    return _call("rows_product", operands, shape, grid, launch, launch.rows, launch.summed, **names)


def _groups(rows: Array, slopes: Array, sizes: Array) -> Array:
    launch, experts = _launch(rows.dtype), sizes.shape[0]
    width, columns = rows.shape[1], slopes.shape[1]
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    shape = jax.ShapeDtypeStruct((experts, width, columns), rows.dtype)
    grid = -(-columns // launch.columns), -(-width // launch.rows), experts
    operands, names = (rows, slopes, ends - sizes, ends), {"K": width, "N": columns}
    blocks = launch.summed, launch.rows
    return _call("groups_product", operands, shape, grid, launch, *blocks, **names)


def tiles(sizes: Int[Array, " E"], count: int, block: int) -> tuple[Array, Array, Array]:
    """Group, first row and row after the group's last of every tile, int32; a tile is `block` rows.

    As many as `count` rows in such groups can need; those past the last one begin where they end.
    """
    ends = jnp.cumsum(sizes)
    own = -(-sizes // block)
    after = jnp.cumsum(own)
    tile = jnp.arange(count // block + sizes.shape[0])
    group = jnp.minimum(jnp.searchsorted(after, tile, side="right"), sizes.shape[0] - 1)
    first = (ends - sizes)[group] + (tile - (after - own)[group]) * block
    end = jnp.where(tile < after[-1], ends[group], first)
    return group.astype(jnp.int32), first.astype(jnp.int32), end.astype(jnp.int32)


def _call(name, operands, shape, grid, launch, rows, summed, **sizes):
    import jax_triton

    from rl_jax.kernels.experts import triton

    made = jax_triton.triton_call(
        *operands,
        kernel=getattr(triton, name),
        out_shape=[shape],
        grid=grid,
        num_warps=launch.warps,
        num_stages=launch.stages,
        BM=rows,
        BN=launch.columns,
        BK=summed,
        **sizes,
    )
    return made[0]
