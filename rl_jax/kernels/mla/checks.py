"""[P] What attention of packed rows and of pages cannot take, named before it is traced further."""

import jax.numpy as jnp
from jax.core import Tracer

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.pages import LANES

OPERANDS = ("float32", "bfloat16", "float64")


def check_rows(q: Array, latents: Array, value_width: int) -> None:
    """Absorbed queries [R, L, H, W] and entries [R, S, W]: ValueError naming argument and limit."""
    _check_queries(q)
    rows, _, _, width = q.shape
    _check("latents", latents, (rows, *latents.shape[1:2], width), q)
    if not 0 < value_width <= width:
        raise ValueError(f"value_width: {value_width} must be between 1 and {width}")


def check_heads(q: Array, k: Array, v: Array) -> None:
    """Queries [R, L, H, A], keys [R, S, G, A], values [R, S, G, V]: as `check_rows`."""
    _check_queries(q)
    rows, _, heads, width = q.shape
    groups = k.shape[2] if k.ndim == 4 and k.shape[2] and heads % k.shape[2] == 0 else heads
    _check("k", k, (rows, *k.shape[1:2], groups, width), q)
    _check("v", v, (*k.shape[:3], *v.shape[-1:]), q)


def check_tokens(
    q: Array, keys: Array, segments: Array, key_segments: Array, first: int | Array
) -> None:
    """Which tokens the queries and the keys are."""
    length, count = q.shape[1], keys.shape[1]
    for name, n in (("q", length), ("keys", count)):
        if n == 0 or n % CHUNK:
            raise ValueError(f"{name}: {n} tokens per row must be a multiple of {CHUNK}")
    for name, x, n in (("segments", segments, length), ("key_segments", key_segments, count)):
        if x.shape != (q.shape[0], n):
            raise ValueError(f"{name}: shape {x.shape} must be {(q.shape[0], n)}")
    if isinstance(first, Tracer):
        return
    if first % CHUNK or not 0 <= first <= count - length:
        limit = f"a multiple of {CHUNK} from 0 to {count - length}"
        raise ValueError(f"first: {first} must be {limit}, for {length} of {count} tokens")


def check_pages(
    name: str, x: Array, pool: Array, pages: Array, positions: Array, n_valid: Array
) -> None:
    """Queries [R, n, H, W] or tokens [R, n, W] called `name`, and where their pages lie.

    Tokens beyond a row's pages cannot be told here, for positions are traced: their place is the
    row's last page.
    """
    ranks = {name: (x, 4 if name == "q" else 3), "pool": (pool, 3), "pages": (pages, 2)}
    ranks |= {"positions": (positions, 1), "n_valid": (n_valid, 1)}
    for key, (array, rank) in ranks.items():
        if array.ndim != rank:
            raise ValueError(f"{key}: needs {rank} axes, not shape {array.shape}")
        if key not in (name, "pool"):
            if array.shape[0] != x.shape[0]:
                raise ValueError(f"{key}: {array.shape[0]} rows must be {name}'s {x.shape[0]}")
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise ValueError(f"{key}: {array.dtype} must be integers")
    if str(x.dtype) not in OPERANDS[:2]:
        raise ValueError(f"{name}: {x.dtype} must be {' or '.join(OPERANDS[:2])}")
    if pool.dtype != jnp.uint32 or pool.shape[2] != LANES:
        raise ValueError(f"pool: {pool.dtype}{list(pool.shape)} must be uint32 in lines of {LANES}")
    if x.shape[1] > CHUNK * pages.shape[1]:
        limit = f"the {CHUNK * pages.shape[1]} of {pages.shape[1]} pages a row"
        raise ValueError(f"{name}: {x.shape[1]} tokens a row exceed {limit}")


def _check_queries(q: Array) -> None:
    if q.ndim != 4:
        raise ValueError(f"q: needs rows, tokens, heads and width, not shape {q.shape}")
    if str(q.dtype) not in OPERANDS:
        raise ValueError(f"q: {q.dtype} must be {' or '.join(OPERANDS)}")


def _check(name: str, x: Array, shape: tuple[int, ...], q: Array) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: shape {x.shape} must be {shape}")
    if x.dtype != q.dtype:
        raise ValueError(f"{name}: {x.dtype} must be q's {q.dtype}")
