"""[P] What Kimi delta attention cannot take, named before anything is traced further."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rl_jax.arrays import AnyArray, Array
from rl_jax.kernels.pages import LANES, TILE, lines_of

OPERANDS = ("float32", "bfloat16", "float64")


def check_operands(q: Array, k: Array, v: Array, g: Array, beta: Array) -> None:
    """Tokens [R, L, H, ...] as `api.chunked` says: ValueError naming the argument and the limit."""
    if q.ndim != 4:
        raise ValueError(f"q: needs rows, tokens, heads and width, not shape {q.shape}")
    if 0 in (*q.shape[:1], *q.shape[2:]):
        raise ValueError(f"q: rows, heads and width of shape {q.shape} must be at least 1")
    check_shape("k", k, q.shape)
    check_shape("v", v, (*q.shape[:3], *v.shape[-1:]))
    if v.shape[-1] == 0:
        raise ValueError("v: width 0 must be at least 1")
    check_shape("g", g, q.shape)
    check_shape("beta", beta, q.shape[:3])
    check_dtype("q", q, OPERANDS)
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, (str(q.dtype),))
    for name, x in (("g", g), ("beta", beta)):
        check_dtype(name, x, (exact(q),))


def exact(q: Array) -> str:
    """What gates and states are in."""
    return "float64" if q.dtype == jnp.float64 else "float32"


def check_state(state: AnyArray, shape: tuple[int, ...], dtype: str) -> None:
    """Finiteness only of values at hand: neither traced nor on devices of other processes."""
    check_shape("state", state, shape)
    check_dtype("state", state, (dtype,))
    if isinstance(state, Tracer) or not getattr(state, "is_fully_addressable", True):
        return
    if not np.isfinite(np.asarray(state)).all():
        raise ValueError("state: has a value that is not finite")


def check_pages(
    pool: Array, pages: Array, n_valid: Array, fresh: Array, rows: int, heads: int
) -> None:
    """A pool, and which of its pages `rows` requests of `heads` heads use."""
    check_dtype("pool", pool, ("uint32",))
    if pool.ndim != 3 or pool.shape[2] != LANES:
        raise ValueError(f"pool: shape {pool.shape} must be (pages, lines, {LANES})")
    if pages.ndim != 2 or pages.shape[0] != rows or pages.shape[1] == 0:
        raise ValueError(f"pages: shape {pages.shape} must be ({rows}, pages of a row), at least 1")
    if heads % pages.shape[1]:
        raise ValueError(f"pages: {heads} heads do not divide over {pages.shape[1]} pages")
    check_shape("n_valid", n_valid, (rows,))
    check_shape("fresh", fresh, (rows,))
    check_dtype("fresh", fresh, ("bool",))
    for name, x in (("pages", pages), ("n_valid", n_valid)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name}: {x.dtype} must be an integer")


def check_head_lines(head_lines: int, lines: int, heads: int, words: int) -> None:
    """Heads of a state of `words` numbers, `heads` of them on a page of `lines` lines."""
    if head_lines % TILE or head_lines < lines_of(words):
        raise ValueError(
            f"head_lines: {head_lines} must be a multiple of {TILE} that holds a state of "
            f"{lines_of(words)} lines"
        )
    if heads * head_lines > lines:
        raise ValueError(f"pool: a page of {lines} lines cannot hold {heads} heads of {head_lines}")


def check_shape(name: str, x: AnyArray, shape: tuple[int, ...]) -> None:
    """ValueError unless of this shape."""
    if x.shape != shape:
        raise ValueError(f"{name}: shape {x.shape} must be {shape}")


def check_dtype(name: str, x: AnyArray, allowed: tuple[str, ...]) -> None:
    """ValueError unless of one of these dtypes."""
    if str(x.dtype) not in allowed:
        raise ValueError(f"{name}: {x.dtype} must be {' or '.join(allowed)}")
