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
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, UInt32

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda import block_sizes

WIDTHS = (16, 32, 64, 128, 256)
"""Supported key widths; value widths are multiples of 16."""
BOUNDED = {"LEVELS": 2, "CENTRE": 54}
"""Diagonal blocks of 16 rows; 54 = half of 15 steps of a log-decay of -5, in base 2."""
UNBOUNDED = {"LEVELS": 6, "CENTRE": 0}
"""Diagonal blocks of one row."""


def row_ranges(bounded: bool) -> np.ndarray:
    """bool[n, C, C]: which tokens' log-decays each row's sum number n holds.

    0: from the chunk's first row up to itself. 1: after itself to the end. Then, for pairs of 32,
    16 (8, 4, 2, 1 without a bound) rows: between itself and the first row of the right half of its
    pair, the later of the two included. Last, with a bound: after the first row of its block of 16
    rows up to itself.
    """
    row, token = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]

    def between(a, b):
        return (token > np.minimum(a, b)) & (token <= np.maximum(a, b))

    halves = (32, 16) if bounded else (32, 16, 8, 4, 2, 1)
    pairs = [between(row, row // (2 * h) * (2 * h) + h) for h in halves]
    blocks = [between(row // 16 * 16, row)] if bounded else []
    return np.stack([token <= row, token > row, *pairs, *blocks])


def obstacle(key_width: int, value_width: int, dtype: DTypeLike, bounded: bool) -> str:
    """Why the kernels cannot run such operands here; empty where they can."""
    del dtype, bounded
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (`make setup-gpu`)"
    if jax.default_backend() != "gpu":
        return f"jax's default backend is {jax.default_backend()}, not gpu"
    return _unsupported(key_width, value_width)


def _unsupported(key_width: int, value_width: int) -> str:
    if key_width not in WIDTHS:
        return f"key width {key_width} is not one of {', '.join(map(str, WIDTHS))}"
    if value_width % 16:
        return f"value width {value_width} is not a multiple of 16"
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
    fault = _unsupported(q.shape[-1], v.shape[-1])
    if fault:
        raise ValueError(f"triton: {fault}")
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
    tiles = rows * (length // CHUNK) * heads
    wide = jax.ShapeDtypeStruct((tiles, CHUNK, width), q.dtype)
    square = jax.ShapeDtypeStruct((tiles, CHUNK, CHUNK), q.dtype)
    total = jax.ShapeDtypeStruct((tiles, width), jnp.float32)
    shapes = [wide, wide, wide, total, square, square, *([square] if adjoint else [])]
    launch = block_sizes.per_chunk(width)
    sizes = {"K": width, "BK": launch.block, "SCALE": width**-0.5}
    sizes |= BOUNDED if bounded else UNBOUNDED
    sizes |= {} if adjoint else {"adjoint": None}
    ranges = jnp.asarray(row_ranges(bounded), jnp.bfloat16)
    return _call("prepare", (q, k, g, beta, ranges, heads), shapes, (tiles,), launch, **sizes)


def _chunk_gradients(operands: tuple[Array, ...], shapes: list, bounded: bool):
    q, k, g, beta, do, entering, delta, dstates, du = operands
    heads, (tiles, width, value_width) = q.shape[2], entering.shape
    square = jax.ShapeDtypeStruct((tiles, CHUNK, CHUNK), q.dtype)
    sizes = {"V": value_width, "BV": next(b for b in (64, 32, 16) if value_width % b == 0)}
    dq, dk, dv, dg, dbeta = shapes
    dcausal, dlower, dv, dbeta = _call(
        "score_cotangents",
        (beta, do, delta, du, heads),
        [square, square, dv, dbeta],
        (tiles,),
        block_sizes.SCORE_COTANGENTS,
        **sizes,
    )
    launch = block_sizes.per_chunk(width)
    sizes |= {"K": width, "BK": launch.block, "SCALE": width**-0.5}
    sizes |= BOUNDED if bounded else UNBOUNDED
    ranges = jnp.asarray(row_ranges(bounded), jnp.bfloat16)
    operands = q, k, g, beta, do, entering, delta, dstates, du, dcausal, dlower, ranges
    grid = tiles, width // launch.block
    dq, dk, dg = _call("chunk_gradients", (*operands, heads), [dq, dk, dg], grid, launch, **sizes)
    return dq, dk, dv, dg, dbeta


def decode(
    q: Float[Array, "R n H K"],
    k: Float[Array, "R n H K"],
    v: Float[Array, "R n H V"],
    g: Float[Array, "R n H K"],
    beta: Float[Array, "R n H"],
    pages: Int[Array, "R pages_per_row"],
    n_valid: Int[Array, " R"],
    pool: UInt32[Array, "pages words"],
    *,
    head_words: int,
) -> tuple[Float[Array, "R n H V"], UInt32[Array, "pages words"]]:
    """A few tokens per request on one device's state pages, in place where `pool` is donated.

    Row r's heads lie in its pages, H / pages_per_row a page of `head_words` words each, the state
    first (`sampler.layout`). Rows with n_valid = 0 touch no page; outputs of tokens past n_valid
    mean nothing. Only the state of a page is written, not the tail of its convolution.
    """
    rows, tokens, heads, width = q.shape
    launch = block_sizes.decode(v.shape[-1])
    sizes = {"K": width, "V": v.shape[-1], "BV": launch.block, "SCALE": width**-0.5}
    sizes |= {"HEADS_PER_PAGE": heads // pages.shape[1], "HEAD_WORDS": head_words}
    scalars = heads, tokens, pool.shape[1], pages.shape[1]
    operands = q, k, v, g, beta, pages.astype(jnp.int32), n_valid.astype(jnp.int32), pool
    shapes = [_like(v), _like(pool)]
    grid = v.shape[-1] // launch.block, heads, rows
    aliases = {len(operands) - 1: 1}
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
        num_stages=launch.stages,
        input_output_aliases=aliases,
        **sizes,
    )
