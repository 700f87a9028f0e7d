# pyright: reportMissingImports=false
"""[P] Calls the Triton kernels of Kimi delta attention from jax, forward, backward and decode.

Imports Triton only when a kernel is called. The backward pass keeps the inputs alone and makes
everything else again. A call is opaque to XLA's partitioner: on a mesh, call it under `shard_map`
over rows or heads.
"""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda import block_sizes
from rl_jax.kernels.kda.anchor import CENTRE
from rl_jax.kernels.pages import DevicePool

WIDTHS = (16, 32, 64, 128)
"""Supported key widths; value widths are multiples of 16."""


def centre(bounded: bool) -> int:
    """What the kernels add to exponents of base 2; 0 for gates without a bound."""
    return CENTRE if bounded else 0


def obstacle(key_width: int, value_width: int, dtype: DTypeLike) -> str:
    """Why the kernels cannot run such operands here; empty where they can."""
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (`make setup-gpu`)"
    if jax.default_backend() != "gpu":
        return f"jax's default backend is {jax.default_backend()}, not gpu"
    return unsupported(key_width, value_width, dtype)


def unsupported(key_width: int, value_width: int, dtype: DTypeLike) -> str:
    """Why there is no kernel for such operands on any GPU; empty where there is."""
    if key_width not in WIDTHS:
        return f"key width {key_width} is not one of {', '.join(map(str, WIDTHS))}"
    if value_width % 16 or not value_width:
        return f"value width {value_width} is not a multiple of 16"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype)} is not float32 or bfloat16"
    return ""


def chunked(
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H K"],
    beta: Float[Array, "R L H"],
    state: Float[Array, "R H K V"],
    reset: Bool[Array, "R N"],
    *,
    bounded: bool,
    export: bool,
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"], Float[Array, "N R H K V"] | None]:
    """Outputs, final state and, if `export`, the states after every chunk; see `api.chunked`."""
    return _chunked(q, k, v, g, beta, state, reset.astype(jnp.int32), bounded, export)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chunked(q, k, v, g, beta, state, reset, bounded, export):
    return _forward(q, k, v, g, beta, state, reset, bounded, export)[0]


def _forward(q, k, v, g, beta, state, reset, bounded, export):
    read_q, read_k, write_k, total, causal, inverse = _prepare(q, k, g, beta, bounded, False)
    grid, launch = _scan_launch(v)
    heads, chunks = v.shape[2], reset.shape[1]
    shapes = [_like(v), _like(state)]
    options = {"after": None}
    if export:
        shapes.append(jax.ShapeDtypeStruct((chunks, *state.shape), jnp.float32))
        options = {}
    operands = read_q, read_k, write_k, v, beta, total, causal, inverse, state, reset
    options |= _sizes(v, state)
    made = _call("scan", (*operands, heads, chunks), shapes, grid, launch, **options)
    saved = q, k, v, g, beta, state, reset
    return (made[0], made[1], made[2] if export else None), saved


def _backward(bounded, export, saved, cotangents):
    q, k, v, g, beta, state, reset = saved
    do, dfinal, dafter = cotangents
    made = _prepare(q, k, g, beta, bounded, True)
    read_q, read_k, write_k, total, causal, inverse, adjoint = made
    grid, launch = _scan_launch(v)
    heads, chunks = v.shape[2], reset.shape[1]
    tiles = total.shape[0]
    states = jax.ShapeDtypeStruct((tiles, *state.shape[2:]), v.dtype)
    values = jax.ShapeDtypeStruct((tiles, CHUNK, v.shape[-1]), v.dtype)
    operands = read_k, write_k, v, beta, total, inverse, state, reset, heads, chunks
    sizes = _sizes(v, state)
    entering, delta = _call("replay", operands, [states, values], grid, launch, **sizes)
    given = dfinal, dafter if export else dfinal, reset, heads, chunks
    operands = do, read_q, read_k, write_k, beta, total, causal, adjoint, *given
    shapes = [states, values, _like(state)]
    dstates, du, dstate = _call(
        "scan_back", operands, shapes, grid, launch, EXPORTED=export, **sizes
    )
    operands = q, k, g, beta, do, entering, delta, dstates, du
    gradients = _chunk_gradients(operands, [_like(x) for x in (q, k, v, g, beta)], bounded)
    return *gradients, dstate, None


_chunked.defvjp(_forward, _backward)


def _prepare(q: Array, k: Array, g: Array, beta: Array, bounded: bool, adjoint: bool):
    rows, length, heads, width = q.shape
    tiles, parts = rows * (length // CHUNK) * heads, 2 if q.dtype == jnp.bfloat16 else 1
    read = jax.ShapeDtypeStruct((tiles, CHUNK, width), q.dtype)
    wide = jax.ShapeDtypeStruct((tiles, parts, CHUNK, width), q.dtype)
    square = jax.ShapeDtypeStruct((tiles, parts, CHUNK, CHUNK), q.dtype)
    total = jax.ShapeDtypeStruct((tiles, width), jnp.float32)
    shapes = [read, wide, wide, total, square, square, *([square] if adjoint else [])]
    launch = block_sizes.prepare(width)
    sizes = {"K": width, "BK": launch.block, "SCALE": width**-0.5, "CENTRE": centre(bounded)}
    sizes |= {} if adjoint else {"adjoint": None}
    return _call("prepare", (q, k, g, beta, heads), shapes, (tiles,), launch, **sizes)


def _chunk_gradients(operands: tuple[Array, ...], shapes: list, bounded: bool):
    q, k, g, beta, do, entering, delta, dstates, du = operands
    heads, (tiles, width, value_width) = q.shape[2], entering.shape
    square = jax.ShapeDtypeStruct((tiles, CHUNK, CHUNK), jnp.float32)
    dq, dk, dv, dg, dbeta = shapes
    launch = block_sizes.score_cotangents(value_width)
    shapes, sizes = [square, square, dv, dbeta], {"V": value_width, "BV": launch.block}
    given = beta, do, delta, du, heads
    made = _call("score_cotangents", given, shapes, (tiles,), launch, **sizes)
    dcausal, dlower, dv, dbeta = made
    launch = block_sizes.chunk_gradients(width)
    sizes |= {"K": width, "BK": launch.block, "SCALE": width**-0.5, "CENTRE": centre(bounded)}
    operands = q, k, g, beta, do, entering, delta, dstates, du, dcausal, dlower
    grid = tiles, width // launch.block
    dq, dk, dg = _call("chunk_gradients", (*operands, heads), [dq, dk, dg], grid, launch, **sizes)
    return dq, dk, dv, dg, dbeta


def decode(
    q: Float[Array, "R n H K"],
    k: Float[Array, "R n H K"],
    v: Float[Array, "R n H V"],
    g: Float[Array, "R n H K"],
    beta: Float[Array, "R n H"],
    pool: DevicePool,
    pages: Int[Array, "R P"],
    n_valid: Int[Array, " R"],
    fresh: Bool[Array, " R"],
    *,
    head_lines: int,
) -> tuple[Float[Array, "R n H V"], DevicePool]:
    """A few tokens per request on one device's state pages, in place where `pool` is donated.

    As `api.decode`. Rows with n_valid = 0 touch no page; outputs of tokens past n_valid mean
    nothing.
    """
    rows, tokens, heads, width = q.shape
    _, lines, lanes = pool.shape
    launch = block_sizes.decode(v.shape[-1])
    sizes = {"K": width, "V": v.shape[-1], "BV": launch.block, "SCALE": width**-0.5}
    sizes |= {"HEADS_PER_PAGE": heads // pages.shape[1], "HEAD_WORDS": head_lines * lanes}
    integers = (x.astype(jnp.int32) for x in (pages, n_valid, fresh))
    operands = q, k, v, g, beta, *integers, pool
    scalars = heads, tokens, lines * lanes, pages.shape[1]
    grid = v.shape[-1] // launch.block, heads, rows
    shapes, aliases = [_like(v), _like(pool)], {len(operands) - 1: 1}
    return _call("decode", (*operands, *scalars), shapes, grid, launch, aliases, **sizes)


def _scan_launch(v: Array) -> tuple[tuple[int, int, int], block_sizes.Launch]:
    rows, _, heads, width = v.shape
    launch = block_sizes.scan(rows * heads, width, v.dtype == jnp.bfloat16)
    return (width // launch.block, heads, rows), launch


def _sizes(v: Array, state: Array) -> dict[str, int]:
    return {"K": state.shape[2], "V": state.shape[3], "BV": _scan_launch(v)[1].block}


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(name, operands, shapes, grid, launch, aliases=None, **sizes):
    """Starts kernel `name`: array operands, then integers, then outputs, then constants."""
    import jax_triton

    from rl_jax.kernels.kda import triton

    return jax_triton.triton_call(
        *operands,
        kernel=getattr(triton, name),
        out_shape=shapes,
        grid=grid,
        num_warps=launch.warps,
        num_stages=1,
        input_output_aliases=aliases,
        **sizes,
    )
