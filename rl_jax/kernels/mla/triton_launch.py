# pyright: reportMissingImports=false
"""[P] Calls the Triton kernels of latent attention from jax: rows forward and backward, pages.

Imports Triton only when a kernel is called. A call is opaque to XLA's partitioner: on a mesh, call
it under `shard_map` over rows or heads.
"""

import math
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Float, Int, UInt32

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.mla import block_sizes
from rl_jax.kernels.mla.online import KEPT

DTYPES = ("float32", "bfloat16")
WIDEST_HEAD = 256
"""Of `attend_heads`, keys and values."""
WIDEST_VALUE = 512
"""Of `attend_pages`; its keys may be wider by WIDEST_REST."""
WIDEST_REST = 64
WIDEST_FLOAT32, SLICE = 192, 64
"""Wider float32 queries on pages do not fit a program's registers: scores from slices."""
SHORT = 16
"""Tokens per request up to which `attend_pages` splits the pages of a request over programs."""
LOG2E = math.log2(math.e)


def obstacle(width: int, value_width: int | None, dtype: DTypeLike) -> str:
    """Why pages of such entries cannot be used here; empty where they can.

    Without a value width: written, which XLA does.
    """
    return _missing() or _unsupported_pages(width, value_width, dtype)


def heads_obstacle(width: int, value_width: int, dtype: DTypeLike, length: int) -> str:
    """Why `attend_heads` cannot run such operands here; empty where it can."""
    del length
    return _missing() or _unsupported_heads(width, value_width, dtype)


def shard_obstacle(width: int, value_width: int, dtype: DTypeLike, length: int, shards: int) -> str:
    """The same where a row lies in `shards` shards of `length` tokens, whose keys are gathered."""
    del length, shards
    return _missing() or _unsupported_heads(width, value_width, dtype)


def _missing() -> str:
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (`make setup-gpu`)"
    if jax.default_backend() != "gpu":
        return f"jax's default backend is {jax.default_backend()}, not gpu"
    return ""


def _unsupported_pages(width: int, value_width: int | None, dtype: DTypeLike) -> str:
    if str(jnp.dtype(dtype)) not in DTYPES:
        return f"{jnp.dtype(dtype)} is not one of {', '.join(DTYPES)}"
    if width > WIDEST_VALUE + WIDEST_REST:
        return f"width {width} is above {WIDEST_VALUE + WIDEST_REST}"
    if width > WIDEST_FLOAT32 and width % SLICE and str(jnp.dtype(dtype)) == "float32":
        return f"width {width} of float32 is above {WIDEST_FLOAT32} and no multiple of {SLICE}"
    if value_width is not None and value_width > WIDEST_VALUE:
        return f"value width {value_width} is above {WIDEST_VALUE}"
    return ""


def _unsupported_heads(width: int, value_width: int, dtype: DTypeLike) -> str:
    if str(jnp.dtype(dtype)) not in DTYPES:
        return f"{jnp.dtype(dtype)} is not one of {', '.join(DTYPES)}"
    wide = [n for n in (width, value_width) if n > WIDEST_HEAD]
    return f"width {wide[0]} is above {WIDEST_HEAD}" if wide else ""


def _check(fault: str, scale: float) -> None:
    fault = fault or ("" if scale > 0 else f"scale {scale} must be above 0")
    if fault:
        raise ValueError(f"triton: {fault}")


def attend_heads(
    q: Float[Array, "R L H A"],
    k: Float[Array, "R S H A"],
    v: Float[Array, "R S H V"],
    segments: Int[Array, "R L"],
    *,
    scale: float,
    first: int | Int[Array, ""] = 0,
    key_segments: Int[Array, "R S"] | None = None,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment, every head on keys of its own; see `api.attend_heads`.

    A segment is contiguous. Padding (segment -1) must hold finite numbers and gives zeros. Queries
    are tokens `first`.. of the rows of keys, `first` a multiple of 64.
    """
    _check(_unsupported_heads(q.shape[-1], v.shape[-1], q.dtype), scale)
    of_keys = segments if key_segments is None else key_segments
    at = jnp.asarray(first, jnp.int32).reshape(1)
    return _attend_heads(q, k, v, segments.astype(jnp.int32), of_keys.astype(jnp.int32), at, scale)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend_heads(q, k, v, segments, of_keys, at, scale):
    return _forward(q, k, v, segments, of_keys, at, scale)[0]


def _forward(q, k, v, segments, of_keys, at, scale):
    rows, length, heads, _ = q.shape
    launch = block_sizes.heads_forward(q.dtype == jnp.bfloat16)
    spans = key_spans(segments, of_keys, at[0], launch.resident)
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), v.dtype)
    shapes = [out, jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)]
    operands = q, k, v, segments, of_keys, at, *spans, heads, length, k.shape[1]
    grid = spans[0].shape[1], heads, rows
    sizes = _head_sizes(q, v, launch)
    made = _call("heads_forward", operands, shapes, grid, launch, scale, **sizes)
    out, log_mass = (checkpoint_name(x, KEPT) for x in made)
    return out, (q, k, v, segments, of_keys, at, out, log_mass)


def _backward(scale, saved, do):
    q, k, v, segments, of_keys, at, out, log_mass = saved
    heads, counts = q.shape[2], (q.shape[2], q.shape[1], k.shape[1])
    bf16 = q.dtype == jnp.bfloat16
    delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), -1).swapaxes(1, 2)
    operands = q, k, v, do, log_mass, delta, segments, of_keys, at

    launch = block_sizes.query_gradients(bf16)
    spans = key_spans(segments, of_keys, at[0], launch.resident)
    sizes = _head_sizes(q, v, launch) | {"FACTOR": scale}
    grid = spans[0].shape[1], heads, q.shape[0]
    given = *operands, *spans, *counts
    (dq,) = _call("heads_query_gradients", given, [_like(q)], grid, launch, scale, **sizes)

    launch = block_sizes.key_gradients(bf16)
    spans = query_spans(of_keys, at[0], q.shape[1], launch.resident)
    sizes = _head_sizes(q, v, launch) | {"FACTOR": scale}
    grid = spans[0].shape[1], heads, q.shape[0]
    given = *operands, *spans, *counts
    shapes = [_like(k), _like(v)]
    dk, dv = _call("heads_key_gradients", given, shapes, grid, launch, scale, **sizes)
    return dq, dk, dv, None, None, None


_attend_heads.defvjp(_forward, _backward)


def key_spans(
    segments: Int[Array, "R L"], of_keys: Int[Array, "R S"], at: int | Array, block: int
) -> tuple[Int[Array, "R N"], Int[Array, "R N"]]:
    """Where the keys of each block of queries start, and from where on all of its queries see them.

    Tokens of a row of keys, multiples of 64; queries are tokens at.. of it. A block without a real
    token has both past its end.
    """
    length = segments.shape[1]
    starts = jax.lax.dynamic_slice_in_dim(_runs(of_keys)[0], at, length, 1)
    beyond = at + (jnp.arange(-(-length // block), dtype=jnp.int32) + 1) * block
    some = _blocks(segments >= 0, block, False)
    first = _blocks(starts // CHUNK * CHUNK, block, 0)
    clear = _blocks(-(-starts // CHUNK) * CHUNK, block, 0)
    first = jnp.min(jnp.where(some, first, beyond[:, None]), -1)
    none = ~jnp.any(some, -1)
    return first, jnp.where(none, beyond, jnp.max(jnp.where(some, clear, 0), -1))


def query_spans(
    of_keys: Int[Array, "R S"], at: int | Array, length: int, block: int
) -> tuple[Int[Array, "R N"], Int[Array, "R N"]]:
    """Where the queries of each block of keys end, and up to where all of its keys are seen.

    Counted from the first of `length` queries, which is token `at` of a row of keys.
    """
    _, ends, real = _runs(of_keys)

    def of(ends: Array) -> Array:
        return _blocks(jnp.where(real, jnp.clip(ends - at, 0, length), 0), block, 0)

    last, clear = of(-(-ends // CHUNK) * CHUNK), of(ends // CHUNK * CHUNK)
    return jnp.max(last, -1), jnp.min(clear, -1)


def _runs(segments: Array) -> tuple[Array, Array, Array]:
    """First token and end of each token's run of one segment, and whether it is real."""
    length = segments.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    change = segments[:, 1:] != segments[:, :-1]
    begins = jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)
    closes = jnp.pad(change, ((0, 0), (0, 1)), constant_values=True)
    starts = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    ends = jax.lax.cummin(jnp.where(closes, index + 1, length), axis=1, reverse=True)
    return starts, ends, segments >= 0


def _blocks(x: Array, block: int, rest: int | bool) -> Array:
    """[R, L] as [R, N, block], the last block filled up with `rest`."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=rest)
    return x.reshape(x.shape[0], -1, block)


def attend_pages(
    q: Float[Array, "R n H W"],
    pool: UInt32[Array, "pages lines 128"],
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    *,
    value_width: int,
    scale: float,
) -> Float[Array, "R n H V"]:
    """Attention of n tokens per request to pages that hold them; see `api.attend_pages`.

    Up to SHORT tokens, parts of PART pages run side by side and are merged in order, and a token's
    bits do not depend on how many tokens come with it. More tokens go over all pages in one
    program. Products take operands of q's type. Tokens past n_valid get zeros.
    """
    rows, tokens, heads, width = q.shape
    _check(_unsupported_pages(width, value_width, q.dtype), scale)
    count = tokens * heads
    bf16 = q.dtype == jnp.bfloat16
    launch = block_sizes.decode(heads, bf16)
    if tokens > SHORT and bf16:
        launch = block_sizes.PREFILL
    numbers = [x.astype(jnp.int32) for x in (pages, positions, n_valid)]
    operands = q, pool, *numbers, heads, count, pool.shape[1], pages.shape[1]
    out = jax.ShapeDtypeStruct((rows, tokens, heads, value_width), q.dtype)
    blocks = -(-count // launch.resident)
    value = {"V": value_width, "BV": _padded(value_width)}
    sizes = {"W": width, "BM": launch.resident, "BN": launch.passing, **value}
    parts = _parts(width) if bf16 or width <= WIDEST_FLOAT32 else (SLICE, 0)
    sizes |= dict(zip(("W0", "W1"), parts, strict=True))
    if tokens > SHORT:
        grid = blocks, rows
        return _call("pages_prefill", operands, [out], grid, launch, scale, **sizes)[0]
    parts = -(-pages.shape[1] // block_sizes.PART)
    one = jax.ShapeDtypeStruct((rows, parts, count), jnp.float32)
    sums = jax.ShapeDtypeStruct((rows, parts, count, value_width), jnp.float32)
    grid = blocks, parts, rows
    part = {"PART": block_sizes.PART}
    made = _call("pages_part", operands, [one, one, sums], grid, launch, scale, **part, **sizes)
    operands = *made, *numbers[1:], heads, count, parts
    grid, launch = (count, rows), block_sizes.MERGE
    return _call("pages_merge", operands, [out], grid, launch, scale, **part, **value)[0]


def _padded(width: int) -> int:
    """The power of two, 16 at least, that holds `width`."""
    return max(16, 1 << (width - 1).bit_length())


def _parts(width: int) -> tuple[int, int]:
    """Two powers of two that hold `width`, the first as large as fits; the second may be 0."""
    first = max(16, 1 << (width.bit_length() - 1))
    return first, _padded(width - first) if width > first else 0


def _head_sizes(q: Array, v: Array, launch: block_sizes.Launch) -> dict[str, int]:
    width, value_width = q.shape[-1], v.shape[-1]
    sizes = dict(zip(("A0", "A1"), _parts(width), strict=True))
    sizes |= {"A": width, "V": value_width, "BV": _padded(value_width)}
    return sizes | {"BM": launch.resident, "BN": launch.passing}


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(name, operands, shapes, grid, launch, scale, **sizes):
    """Starts kernel `name`: array operands, then integers, then outputs, then constants."""
    import jax_triton

    from rl_jax.kernels.mla import triton

    return jax_triton.triton_call(
        *operands,
        kernel=getattr(triton, name),
        out_shape=shapes,
        grid=grid,
        num_warps=launch.warps,
        num_stages=launch.stages,
        SCALE=scale * LOG2E,
        **sizes,
    )
