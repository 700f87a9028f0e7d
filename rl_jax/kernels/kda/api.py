"""[P] Kimi delta attention: the functions models call, and which backend runs them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.choice import choose
from rl_jax.kernels.kda import context, pallas_tpu, pallas_tpu_decode, triton_launch, xla
from rl_jax.kernels.kda import pages as xla_pages
from rl_jax.kernels.kda.anchor import STRONGEST_BOUND
from rl_jax.kernels.kda.checks import (
    OPERANDS,
    check_dtype,
    check_head_lines,
    check_operands,
    check_pages,
    check_shape,
    check_state,
    exact,
)
from rl_jax.kernels.kda.gates import bounded_gate, softplus_gate
from rl_jax.kernels.kda.recurrent import SHORT
from rl_jax.kernels.pages import DevicePool
from rl_jax.sharding import CONTEXT, ROWS, TENSOR, degree, on_each_device

__all__ = ["SHORT", "backends", "bounded_gate", "chunked", "decode", "softplus_gate"]

_TOKENS, _STATE = PartitionSpec(ROWS, CONTEXT, TENSOR), PartitionSpec(ROWS, TENSOR)
OPERAND_CUTS = dict.fromkeys(("q", "k", "v", "g", "beta"), _TOKENS) | {
    "state": _STATE,
    "reset": PartitionSpec(ROWS, CONTEXT),
}
"""Where rows, tokens of a row and heads lie on a mesh."""
RESULT_CUTS = (_TOKENS, _STATE, PartitionSpec(None, ROWS, TENSOR))
"""The same of out, final and the states after every chunk."""


class Backend(NamedTuple):
    """One way to run `chunked` and `decode`."""

    chunked: Callable[..., tuple[Array, Array, Array | None]]
    """(q, k, v, g, beta, state, reset, *, bounded, export) -> (out, final, states or None)."""
    decode: Callable[..., tuple[Array, Array]]
    """(q, k, v, g, beta, pool, pages, n_valid, fresh, *, head_lines) -> (out, pool)."""
    obstacle: Callable[[int, int, DTypeLike], str]
    """(key width, value width, dtype) -> why it cannot run such operands here, or ''."""
    opaque: bool
    """XLA cannot cut its kernels over a mesh: `chunked` runs on each device's rows and heads."""


BACKENDS = {
    "pallas_tpu": Backend(pallas_tpu.chunked, pallas_tpu_decode.decode, pallas_tpu.obstacle, True),
    "triton": Backend(triton_launch.chunked, triton_launch.decode, triton_launch.obstacle, True),
    "xla": Backend(xla.chunked, xla_pages.decode, xla.obstacle, False),
}
"""The best first; xla runs everything everywhere."""


def backends(key_width: int, value_width: int, dtype: DTypeLike) -> dict[str, str]:
    """Backend -> why it cannot run such operands here, empty where it can; the best first.

    The first that can is taken. jax's default backend counts as "here".
    """
    return {name: own.obstacle(key_width, value_width, dtype) for name, own in BACKENDS.items()}


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
    below `lower_bound`, or has no bound where that is None; that g keeps to a bound is not checked,
    and below -5.82 it gives NaN. Padding tokens have k = v = beta = g = 0. Where `reset` is true
    the state is zeroed before the chunk. With `export` also the states after every chunk,
    [N, R, H, K, V], before any reset of the next; not where a mesh cuts the tokens of a row.
    Differentiable in everything but `reset`. A traced state is not checked for values that are not
    finite.
    Equations: arXiv 2510.26692, sec. 3.
    """
    check_operands(q, k, v, g, beta)
    rows, length, heads, width = q.shape
    if length == 0 or length % CHUNK:
        raise ValueError(f"q: {length} tokens per row must be a multiple of {CHUNK}")
    shape = rows, heads, width, v.shape[-1]
    if state is None:
        state = jnp.zeros(shape, exact(q))
    else:
        check_state(state, shape, exact(q))
    if reset is None:
        reset = jnp.zeros((rows, length // CHUNK), bool)
    check_shape("reset", reset, (rows, length // CHUNK))
    check_dtype("reset", reset, ("bool",))
    if lower_bound is not None and not -STRONGEST_BOUND < lower_bound < 0:
        raise ValueError(
            f"lower_bound: {lower_bound} must be above -{STRONGEST_BOUND} and below 0, "
            "or None for gates without a bound"
        )
    chosen = choose(backend, BACKENDS, backends(width, v.shape[-1], q.dtype))

    def run(*operands: Array) -> tuple[Array, ...]:
        made = chosen.chunked(*operands, bounded=lower_bound is not None, export=export)
        return tuple(x for x in made if x is not None)

    if degree(CONTEXT) > 1:
        if export:
            raise ValueError("export: not where a mesh cuts the tokens of a row (context > 1)")
        local = partial(chunked, lower_bound=lower_bound, backend=backend)
        run = on_each_device(
            partial(context.chunked, local, axis=CONTEXT), OPERAND_CUTS, RESULT_CUTS[:2]
        )
    elif chosen.opaque:
        run = on_each_device(run, OPERAND_CUTS, RESULT_CUTS[: 3 if export else 2])
    return run(q, k, v, g, beta, state, reset)


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
    backend: str | None = None,
) -> tuple[Float[Array, "R n H V"], DevicePool]:
    """At most 16 tokens per request on one device's state pages, in place where it is donated.

    Operands as those of `chunked`. A row's H heads lie in its P pages, H / P a page, head h of a
    page at line h * head_lines, its float32 state [K, V] first, in whole lines of 128 words: what a
    state leaves of its last line may change too, nothing else of a page does. A `fresh` row starts
    from zeros whatever its pages hold. Tokens past `n_valid` change no state and their outputs mean
    nothing; a row without any writes nowhere or to the null page.
    """
    check_operands(q, k, v, g, beta)
    rows, tokens, heads, width = q.shape
    check_dtype("q", q, OPERANDS[:2])
    if not 0 < tokens <= SHORT:
        raise ValueError(f"q: {tokens} tokens per row must be at least 1 and at most {SHORT}")
    check_pages(pool, pages, n_valid, fresh, rows, heads)
    per_page = heads // pages.shape[1]
    check_head_lines(head_lines, pool.shape[1], per_page, width * v.shape[-1])
    chosen = choose(backend, BACKENDS, backends(width, v.shape[-1], q.dtype))
    return chosen.decode(q, k, v, g, beta, pool, pages, n_valid, fresh, head_lines=head_lines)
