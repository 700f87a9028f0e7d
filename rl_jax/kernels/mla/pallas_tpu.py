"""[P] Latent attention on a TPU: what can run, and training with keys of every head.

Training is jax's own splash attention; pages have kernels of their own (`pallas_tpu_pages`,
`pallas_tpu_write`), since jax's paged kernels keep keys and values in arrays of their own.
"""

from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import Array, round_up
from rl_jax.kernels.mla.online import KEPT
from rl_jax.kernels.mla.pallas_tpu_pages import DTYPES, attend_pages, unsupported
from rl_jax.kernels.mla.pallas_tpu_write import write_pages
from rl_jax.kernels.pages import LANES

__all__ = ["attend_heads", "attend_pages", "heads_obstacle", "obstacle", "write_pages"]

BLOCK = 512
"""Queries, and keys, at work at once; twice as many where a bfloat16 row is too long."""
BLOCKS = 512
"""Of a row at most: which pairs of blocks meet lies in scalar memory, 3 bytes a pair."""


def obstacle(width: int, value_width: int | None, dtype: DTypeLike) -> str:
    """Why the kernels of pages cannot run such operands here; empty where they can.

    `value_width` is None for writing.
    """
    return _elsewhere() or unsupported(width, value_width, dtype)


def heads_obstacle(width: int, value_width: int, dtype: DTypeLike, length: int) -> str:
    """Why `attend_heads` cannot run such operands here; empty where it can."""
    del width, value_width
    return _elsewhere() or _unsupported_heads(dtype, length)


def _elsewhere() -> str:
    backend = jax.default_backend()
    return "" if backend == "tpu" else f"jax's default backend is {backend}, not tpu"


def _unsupported_heads(dtype: DTypeLike, length: int) -> str:
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"dtype {name} is not {' or '.join(DTYPES)}"
    longest = BLOCKS * BLOCK * (1 if name == "float32" else 2)
    if length > longest:
        return f"{length} {name} tokens per row must be at most {longest}"
    return ""


def shard_obstacle(width: int, value_width: int, dtype: DTypeLike, length: int, shards: int) -> str:
    """The same where a row lies in `shards` shards of `length` tokens, whose keys are gathered."""
    del width, value_width
    return _elsewhere() or _unsupported_shard(dtype, length, length * shards)


def _unsupported_shard(dtype: DTypeLike, length: int, count: int) -> str:
    if length % LANES:
        return f"{length} tokens per shard are not a multiple of {LANES}"
    block = _shard_block(dtype, length)
    if length * count > (BLOCKS * block) ** 2:
        return f"{length} {jnp.dtype(dtype).name} queries of {count} tokens in blocks of {block}"
    return _unsupported_heads(dtype, 0)


def _shard_block(dtype: DTypeLike, length: int) -> int:
    """The largest block, of those that a chip holds, that divides a shard."""
    largest = BLOCK if jnp.dtype(dtype) == jnp.float32 else 2 * BLOCK
    return gcd(length, largest)


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
    """Causal attention inside each segment of packed rows; zeros for padding (segment -1).

    Pairs of blocks above the diagonal or without a segment in common are skipped. Products take
    operands of q's dtype (float32: all its bits) and sum in float32. Without `key_segments` queries
    and keys are the same tokens; with them queries are tokens `first`.. of the rows of keys, and
    `first` is a multiple of L.
    """
    if key_segments is not None:
        return _attend_shard(q, k, v, segments, key_segments, first, scale)
    length = q.shape[1]
    fault = _unsupported_heads(q.dtype, length)
    if fault:
        raise ValueError(f"q: {fault}")
    block = min(BLOCK if length <= BLOCKS * BLOCK else 2 * BLOCK, round_up(length, LANES))
    padding = (0, 0), (0, -length % block)
    ids = jnp.pad(segments.astype(jnp.int32), padding, constant_values=-1)

    def by_head(x: Array) -> Array:
        return jnp.swapaxes(jnp.pad(x, (*padding, (0, 0), (0, 0))), 1, 2)

    at = jnp.zeros((), jnp.int32)
    out = _splash(by_head(q * scale), by_head(k), by_head(v), ids, ids, at, block)
    out = jnp.swapaxes(out, 1, 2)[:, :length]
    return jnp.where((segments >= 0)[..., None, None], out, 0)


def _attend_shard(q, k, v, segments, key_segments, first, scale):
    """Whole blocks alone: every query meets its own key, so no sum is empty."""
    fault = _unsupported_shard(q.dtype, q.shape[1], k.shape[1])
    if fault:
        raise ValueError(f"q: {fault}")
    ids = (x.astype(jnp.int32) for x in (segments, key_segments))
    by_head = (jnp.swapaxes(x, 1, 2) for x in (q * scale, k, v))
    at = jnp.asarray(first, jnp.int32)
    out = jnp.swapaxes(_splash(*by_head, *ids, at, _shard_block(q.dtype, q.shape[1])), 1, 2)
    return jnp.where((segments >= 0)[..., None, None], out, 0)


def _precision(dtype: DTypeLike):
    """Splash attention asks for none, which multiplies float32 as bfloat16."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def _attend(
    q: Array, k: Array, v: Array, ids: Array, of_keys: Array, at: Array, block: int
) -> Array:
    """Rows [R, H, L, ...] one after the other; padding attends to padding, so no sum is empty."""
    names = "block_q", "block_q_dkv", "block_q_dq", "block_kv", "block_kv_dkv", "block_kv_dq"
    computed = dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(block, BLOCK))
    options = {
        "block_sizes": splash.BlockSizes(**dict.fromkeys(names, block), **computed),
        "is_mqa": False,
        "save_residuals": False,
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": None,
        "residual_checkpoint_name": KEPT,
        "mask_function": _is_causal,
        "interpret": False,
    }

    def one(row):
        *operands, ids, of_keys = row
        by_query, by_key = _block_masks(ids, of_keys, at, block)
        kernel = splash.SplashAttentionKernel(by_query, by_query, by_key, **options)
        return kernel(*operands, splash.SegmentIds(ids, of_keys))

    return jax.lax.map(one, (q, k, v, ids, of_keys))


def _is_causal(query: Array, key: Array) -> Array:
    return query >= key


def _block_masks(
    ids: Int[Array, " L"], of_keys: Int[Array, " S"], at: Int[Array, ""], block: int
) -> tuple[MaskInfo, MaskInfo]:
    """Which blocks of keys each block of queries meets: causal, and segments in common.

    For the kernels that walk over keys and those that walk over queries. Where a pair does not
    meet, `data_next` names the nearest block that does, which costs no copy. Queries are tokens
    `at`.. of the keys, whole blocks.
    """
    (low, high), (key_low, key_high) = _extents(ids, block), _extents(of_keys, block)
    own, count = at // block, low.shape[0]
    query, key = own + jnp.arange(count)[:, None], jnp.arange(key_low.shape[0])[None]
    shared = (low[:, None] <= key_high) & (key_low <= high[:, None])
    meet = (key < query) & shared | (key == query)
    first = jnp.argmax(meet, 1)
    last = count - 1 - jnp.argmax(meet[::-1], 0)
    by_query = jnp.clip(key, first[:, None], query)
    by_key = jnp.clip(query - own, jnp.clip(key - own, 0, last), last)

    def made(nearest):
        # Declared a host array there, and taken as an operand like the others.
        places: Any = at + jnp.arange(ids.shape[0], dtype=jnp.int32)
        nearest, active = nearest.astype(jnp.int16)[None], meet.astype(jnp.int8)[None]
        return MaskInfo(nearest, None, active, None, places)

    return made(by_query), made(by_key)


def _extents(ids: Int[Array, " L"], block: int) -> tuple[Array, Array]:
    """Lowest and highest segment of each block; of padding the lowest is above all."""
    blocks = ids.reshape(-1, block)
    return jnp.where(blocks < 0, jnp.iinfo(jnp.int32).max, blocks).min(1), blocks.max(1)


def _exact(q: Array, k: Array, v: Array, ids: Array, of_keys: Array, at: Array, block: int):
    with _precision(q.dtype):
        return _attend(q, k, v, ids, of_keys, at, block)


def _splash_forward(q, k, v, ids, of_keys, at, block):
    with _precision(q.dtype):
        return jax.vjp(lambda q, k, v: _attend(q, k, v, ids, of_keys, at, block), q, k, v)


def _splash_backward(block, pull, d_out):
    """Under the precision of the forward pass, which a rule traced later would not see."""
    del block
    with _precision(d_out.dtype):
        return *pull(d_out), None, None, None


_splash = jax.custom_vjp(_exact, nondiff_argnums=(6,))
_splash.defvjp(_splash_forward, _splash_backward)
