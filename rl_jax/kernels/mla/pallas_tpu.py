"""[P] Latent attention on a TPU: what can run, and training with keys of every head.

Training is jax's own splash attention; pages have kernels of their own (`pallas_tpu_pages`,
`pallas_tpu_write`), since jax's paged kernels keep keys and values in arrays of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import Array, round_up
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


def attend_heads(
    q: Float[Array, "R L H A"],
    k: Float[Array, "R L H A"],
    v: Float[Array, "R L H V"],
    segments: Int[Array, "R L"],
    *,
    scale: float,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment of packed rows; zeros for padding (segment -1).

    Pairs of blocks above the diagonal or without a segment in common are skipped. Products take
    operands of q's dtype (float32: all its bits) and sum in float32.
    """
    length = q.shape[1]
    fault = _unsupported_heads(q.dtype, length)
    if fault:
        raise ValueError(f"q: {fault}")
    block = min(BLOCK if length <= BLOCKS * BLOCK else 2 * BLOCK, round_up(length, LANES))
    padding = (0, 0), (0, -length % block)
    ids = jnp.pad(segments.astype(jnp.int32), padding, constant_values=-1)

    def by_head(x: Array) -> Array:
        return jnp.swapaxes(jnp.pad(x, (*padding, (0, 0), (0, 0))), 1, 2)

    out = _splash(by_head(q * scale), by_head(k), by_head(v), ids, block)
    out = jnp.swapaxes(out, 1, 2)[:, :length]
    return jnp.where((segments >= 0)[..., None, None], out, 0)


def _precision(dtype: DTypeLike):
    """Splash attention asks for none, which multiplies float32 as bfloat16."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def _attend(q: Array, k: Array, v: Array, ids: Array, block: int) -> Array:
    """Rows [R, H, L, ...] one after the other; padding attends to padding, so no sum is empty."""
    names = "block_q", "block_q_dkv", "block_q_dq", "block_kv", "block_kv_dkv", "block_kv_dq"
    computed = dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(block, BLOCK))
    options = {
        "block_sizes": splash.BlockSizes(**dict.fromkeys(names, block), **computed),
        "is_mqa": False,
        "save_residuals": False,
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": None,
        "residual_checkpoint_name": None,
        "mask_function": _is_causal,
        "interpret": False,
    }

    def one(row):
        *operands, ids = row
        by_query, by_key = _block_masks(ids, block)
        kernel = splash.SplashAttentionKernel(by_query, by_query, by_key, **options)
        return kernel(*operands, splash.SegmentIds(ids, ids))

    return jax.lax.map(one, (q, k, v, ids))


def _is_causal(query: Array, key: Array) -> Array:
    return query >= key


def _block_masks(ids: Int[Array, " L"], block: int) -> tuple[MaskInfo, MaskInfo]:
    """Which blocks of keys each block of queries meets: causal, and segments in common.

    For the kernels that walk over keys and those that walk over queries. Where a pair does not
    meet, `data_next` names the nearest block that does, which costs no copy.
    """
    blocks = ids.reshape(-1, block)
    low = jnp.where(blocks < 0, jnp.iinfo(jnp.int32).max, blocks).min(1)
    high = blocks.max(1)
    number = jnp.arange(blocks.shape[0])
    query, key = number[:, None], number[None]
    shared = (low[:, None] <= high) & (low <= high[:, None])
    meet = (key < query) & shared | (key == query)
    first = jnp.argmax(meet, 1)
    last = blocks.shape[0] - 1 - jnp.argmax(meet[::-1], 0)
    by_query = jnp.clip(key, first[:, None], query)
    by_key = jnp.clip(query, key, last)

    def made(nearest):
        places = np.arange(ids.shape[0], dtype=np.int32)
        nearest, active = nearest.astype(jnp.int16)[None], meet.astype(jnp.int8)[None]
        return MaskInfo(nearest, None, active, None, places)

    return made(by_query), made(by_key)


def _exact(q: Array, k: Array, v: Array, ids: Array, block: int) -> Array:
    with _precision(q.dtype):
        return _attend(q, k, v, ids, block)


def _splash_forward(q, k, v, ids, block):
    with _precision(q.dtype):
        return jax.vjp(lambda q, k, v: _attend(q, k, v, ids, block), q, k, v)


def _splash_backward(block, pull, d_out):
    """Under the precision of the forward pass, which a rule traced later would not see."""
    del block
    with _precision(d_out.dtype):
        return *pull(d_out), None


_splash = jax.custom_vjp(_exact, nondiff_argnums=(4,))
_splash.defvjp(_splash_forward, _splash_backward)
