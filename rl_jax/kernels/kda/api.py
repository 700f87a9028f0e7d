"""[P] Kimi delta attention: the functions models call, and which backend runs them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda import xla
from rl_jax.kernels.kda.chunk import STRONGEST_BOUND
from rl_jax.kernels.kda.gates import bounded_gate, softplus_gate
from rl_jax.kernels.kda.recurrent import SHORT, recurrent

__all__ = ["SHORT", "backends", "bounded_gate", "chunked", "recurrent", "softplus_gate"]

OPERANDS = ("float32", "bfloat16", "float64")


class Backend(NamedTuple):
    """One way to run `chunked`."""

    chunked: Callable[..., tuple[Array, Array, Array | None]]
    """(q, k, v, g, beta, state, reset, *, bounded, export) -> (out, final, states or None)."""
    obstacle: Callable[[int, int, DTypeLike, bool], str]
    """(key width, value width, dtype, bounded) -> why it cannot run such operands here, or ''."""


BACKENDS = {"xla": Backend(xla.chunked, xla.obstacle)}
"""The best first; xla runs everything everywhere."""


def backends(
    key_width: int, value_width: int, dtype: DTypeLike, lower_bound: float | None
) -> dict[str, str]:
    """Backend -> why it cannot run such operands here, empty where it can; the best first.

    `chunked` takes the first that can. jax's default backend counts as "here".
    """
    asked = key_width, value_width, dtype, lower_bound is not None
    return {name: backend.obstacle(*asked) for name, backend in BACKENDS.items()}


def chunked(
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H K"],
    beta: Float[Array, "R L H"],
    state: Float[Array, "R H K V"] | None = None,
    reset: Bool[Array, "R N"] | None = None,
    *,
    lower_bound: float | None = -5.0,
    backend: str | None = None,
    export: bool = False,
) -> tuple[Float[Array, "..."], ...]:
    """Outputs [R, L, H, V] and final state of R packed rows of N = L / 64 chunks each.

    q and k L2-normalised, q, k, v of one dtype (float32 or bfloat16, also that of the outputs);
    g (natural log, <= 0), beta, state float32. All float64 is taken too, for checks. g is never
    below `lower_bound`, or has no bound where that is None. Padding tokens have
    k = v = beta = g = 0. Where `reset` is true the state is
    zeroed before the chunk. With `export` also the states after every chunk, [N, R, H, K, V],
    before any reset of the next. Differentiable in everything but `reset`.
    Equations: arXiv 2510.26692, sec. 3.
    """
    _check_operands(q, k, v, g, beta)
    rows, length, heads, width = q.shape
    if state is None:
        state = jnp.zeros((rows, heads, width, v.shape[-1]), _exact(q))
    if reset is None:
        reset = jnp.zeros((rows, length // CHUNK), bool)
    _check_state(state, (rows, heads, width, v.shape[-1]), _exact(q))
    _check_shape("reset", reset, (rows, length // CHUNK))
    _check_dtype("reset", reset, ("bool",))
    if lower_bound is not None and not -STRONGEST_BOUND < lower_bound < 0:
        raise ValueError(
            f"lower_bound: {lower_bound} must be above -{STRONGEST_BOUND} and below 0, "
            "or None for gates without a bound"
        )
    run = _chosen(backend, backends(width, v.shape[-1], q.dtype, lower_bound))
    out, final, states = run(
        q, k, v, g, beta, state, reset, bounded=lower_bound is not None, export=export
    )
    return (out, final) if states is None else (out, final, states)


def _chosen(name: str | None, obstacles: dict[str, str]) -> Callable[..., tuple]:
    if name is None:
        name = next(name for name, obstacle in obstacles.items() if not obstacle)
    if name not in obstacles:
        raise ValueError(f"backend: {name!r} is not one of {', '.join(obstacles)}")
    if obstacles[name]:
        raise ValueError(f"backend: {name} cannot run here: {obstacles[name]}")
    return BACKENDS[name].chunked


def _check_operands(q: Array, k: Array, v: Array, g: Array, beta: Array) -> None:
    if q.ndim != 4:
        raise ValueError(f"q: needs rows, tokens, heads and width, not shape {q.shape}")
    if q.shape[1] == 0 or q.shape[1] % CHUNK:
        raise ValueError(f"q: {q.shape[1]} tokens per row must be a multiple of {CHUNK}")
    _check_shape("k", k, q.shape)
    _check_shape("v", v, (*q.shape[:3], *v.shape[-1:]))
    _check_shape("g", g, q.shape)
    _check_shape("beta", beta, q.shape[:3])
    _check_dtype("q", q, OPERANDS)
    for name, x in (("k", k), ("v", v)):
        _check_dtype(name, x, (str(q.dtype),))
    for name, x in (("g", g), ("beta", beta)):
        _check_dtype(name, x, (_exact(q),))


def _exact(q: Array) -> str:
    """What gates and states are in."""
    return "float64" if q.dtype == jnp.float64 else "float32"


def _check_state(state: Array, shape: tuple[int, ...], dtype: str) -> None:
    """Finiteness only outside a trace, where there are values."""
    _check_shape("state", state, shape)
    _check_dtype("state", state, (dtype,))
    if not isinstance(state, Tracer) and not jnp.all(jnp.isfinite(state)):
        raise ValueError("state: has a value that is not finite")


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: shape {x.shape} must be {shape}")


def _check_dtype(name: str, x: Array, allowed: tuple[str, ...]) -> None:
    if str(x.dtype) not in allowed:
        raise ValueError(f"{name}: {x.dtype} must be {' or '.join(allowed)}")
