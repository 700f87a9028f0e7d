"""[P] Latent attention: the functions models and the page layout call, and which backend runs them.

In training queries come absorbed (`attend_rows`) or with keys and values of every head or group of
heads (`attend_heads`, fewer products where heads are narrower than latents); against the cache
absorbed. Grouped-query attention keeps (value | key) of a KV head in pages of its own and asks them
as latents.
Pages are one device's: uint32[pages, lines, 128], a token page holds 64 tokens x W numbers, one
after the other from its first word.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.choice import choose
from rl_jax.kernels.mla import context, pallas_tpu, triton_launch, xla
from rl_jax.kernels.mla import pages as xla_pages
from rl_jax.kernels.mla.checks import check_heads, check_pages, check_rows, check_tokens
from rl_jax.kernels.pages import LANES, DevicePool
from rl_jax.sharding import CONTEXT, ROWS, TENSOR, degree, on_each_device

__all__ = [
    "attend_heads",
    "attend_pages",
    "attend_rows",
    "backends",
    "heads_backends",
    "write_pages",
]

_TOKENS, _SHARED = PartitionSpec(ROWS, CONTEXT, TENSOR), PartitionSpec(ROWS, CONTEXT)
HEADS_CUTS = {"q": _TOKENS, "k": _TOKENS, "v": _TOKENS, "segments": _SHARED}
ROWS_CUTS = {"q": _TOKENS, "latents": _SHARED, "segments": _SHARED}
"""Where rows, tokens of a row and heads lie on a mesh."""


class Backend(NamedTuple):
    """One way to run the functions on pages, and `attend_heads`."""

    attend_pages: Callable[..., Array]
    """(q, pool, pages, positions, n_valid, *, width, value_width, scale) -> out."""
    write_pages: Callable[..., Array]
    """(pool, pages, positions, n_valid, values) -> pool."""
    obstacle: Callable[[int, int | None, DTypeLike], str]
    """(width, value width, dtype) -> why it cannot run such operands here, or ''; the value width
    is None for writing."""
    attend_heads: Callable[..., Array]
    """(q, k, v, segments, *, scale, first, key_segments) -> out, the last two where a mesh cuts
    tokens."""
    heads_obstacle: Callable[[int, int, DTypeLike, int], str]
    """(key width, value width, dtype, tokens a row) -> why `attend_heads` cannot run them here."""
    shard_obstacle: Callable[[int, int, DTypeLike, int, int], str]
    """(..., tokens a shard, shards a row) -> the same where a mesh cuts the tokens of a row."""
    opaque: bool
    """XLA cannot cut its kernels over a mesh: `attend_heads` runs on each device's own heads."""


def _with_zeros(attend: Callable[..., Array]) -> Callable[..., Array]:
    """`attend` for queries as wide as a token, where those given are narrower."""

    def run(q: Array, *rest: Array, width: int, **shape: float) -> Array:
        q = jnp.pad(q, (*((0, 0),) * 3, (width - q.shape[-1], 0)))
        return attend(q, *rest, **shape)

    return run


BACKENDS = {
    "pallas_tpu": Backend(
        _with_zeros(pallas_tpu.attend_pages),
        pallas_tpu.write_pages,
        pallas_tpu.obstacle,
        pallas_tpu.attend_heads,
        pallas_tpu.heads_obstacle,
        pallas_tpu.shard_obstacle,
        True,
    ),
    "triton": Backend(
        _with_zeros(triton_launch.attend_pages),
        xla_pages.write_pages,
        triton_launch.obstacle,
        triton_launch.attend_heads,
        triton_launch.heads_obstacle,
        triton_launch.shard_obstacle,
        True,
    ),
    "xla": Backend(
        xla_pages.attend_pages,
        xla_pages.write_pages,
        lambda width, value_width, dtype: "",
        xla.attend_heads,
        lambda width, value_width, dtype, length: "",
        lambda width, value_width, dtype, length, shards: "",
        False,
    ),
}
"""The best first; xla runs everything everywhere, and writes in place on a GPU too."""


def backends(width: int, value_width: int | None, dtype: DTypeLike) -> dict[str, str]:
    """Backend -> why it cannot run on such pages here, empty where it can; the best first.

    The first that can is taken. `value_width` None asks about writing.
    """
    return {name: own.obstacle(width, value_width, dtype) for name, own in BACKENDS.items()}


def heads_backends(
    key_width: int, value_width: int, dtype: DTypeLike, length: int, shards: int = 1
) -> dict[str, str]:
    """Backend -> why it cannot run `attend_heads` here, empty where it can; the best first.

    For rows in `shards` shards of `length` tokens.
    """
    asked = key_width, value_width, dtype, length
    if shards > 1:
        return {name: own.shard_obstacle(*asked, shards) for name, own in BACKENDS.items()}
    return {name: own.heads_obstacle(*asked) for name, own in BACKENDS.items()}


def attend_rows(
    q: Float[Array, "R L H W"],
    latents: Float[Array, "R L W"],
    segments: Int[Array, "R L"],
    *,
    value_width: int,
    scale: float,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment of packed rows; zeros for padding (segment -1).

    All heads read the same latents, whose first `value_width` numbers are the values. L is a
    multiple of 64. Products add up in float32. Differentiable in q and latents. On XLA alone.
    """
    check_rows(q, latents, value_width)
    check_tokens(q, latents, segments, segments, 0)
    options = {"value_width": value_width, "scale": scale}
    if degree(CONTEXT) == 1:
        return xla.attend_rows(q, latents, segments, **options)

    def run(*operands: Array) -> tuple[Array, ...]:
        return (context.attend_rows(*operands, **options, axis=CONTEXT),)

    return on_each_device(run, ROWS_CUTS, (_TOKENS,))(q, latents, segments)[0]


def attend_heads(
    q: Float[Array, "R L H A"],
    k: Float[Array, "R L G A"],
    v: Float[Array, "R L G V"],
    segments: Int[Array, "R L"],
    *,
    scale: float,
    backend: str | None = None,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment of packed rows, every head on keys of its own.

    With G < H each of the G keys and values serves H / G heads that lie side by side.
    L is a multiple of 64, a segment lies together; padding (segment -1) holds finite numbers and
    gives zeros. One dtype, float32 or bfloat16; sums in float32. Differentiable in q, k and v.
    """
    check_heads(q, k, v)
    check_tokens(q, k, segments, segments, 0)
    shards = degree(CONTEXT)
    found = heads_backends(q.shape[-1], v.shape[-1], q.dtype, q.shape[1] // shards, shards)
    chosen = choose(backend, BACKENDS, found)

    def attend(q: Array, k: Array, v: Array, segments: Array, **options: Any) -> Array:
        if chosen.opaque and k.shape[2] < q.shape[2]:
            k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
        return chosen.attend_heads(q, k, v, segments, **options)

    def run(*operands: Array) -> tuple[Array, ...]:
        if shards > 1:
            return (context.attend_heads(*operands, scale=scale, axis=CONTEXT, local=attend),)
        return (attend(*operands, scale=scale),)

    if chosen.opaque or shards > 1:
        run = on_each_device(run, HEADS_CUTS, (_TOKENS,))
    return run(q, k, v, segments)[0]


def attend_pages(
    q: Float[Array, "R n H W"],
    pool: DevicePool,
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    *,
    value_width: int,
    scale: float,
    width: int | None = None,
    backend: str | None = None,
) -> Float[Array, "R n H V"]:
    """Causal attention of n tokens per request, the first at `positions`, to pages that hold them.

    Token t of row r lies in page pages[r, t // 64]; it has `width` numbers (by default W), the last
    W of them its key, the first `value_width` its value. What lies past the n_valid tokens may be
    anything, NaN too; outputs of tokens past them mean nothing. A row's bits depend on nothing but
    the row. Tokens beyond the table cannot be checked and mean nothing.
    """
    check_pages("q", q, pool, pages, positions, n_valid)
    width = q.shape[-1] if width is None else width
    if width < q.shape[-1]:
        raise ValueError(f"width: {width} must be at least q's {q.shape[-1]}")
    _check_pages(pool, width)
    if not 0 < value_width <= width:
        raise ValueError(f"value_width: {value_width} must be between 1 and {width}")
    run = choose(backend, BACKENDS, backends(width, value_width, q.dtype)).attend_pages
    shape = {"width": width, "value_width": value_width, "scale": scale}
    return run(q, pool, pages, positions, n_valid, **shape)


def write_pages(
    pool: DevicePool,
    pages: Int[Array, "R S"],
    positions: Int[Array, " R"],
    n_valid: Int[Array, " R"],
    values: Float[Array, "R n W"],
    *,
    backend: str | None = None,
) -> DevicePool:
    """Writes the first n_valid of n tokens per request, the first at `positions`.

    In place where the pool is donated; what is not valid goes nowhere or to the null page.
    Tokens beyond the table cannot be checked; they go into the row's last page.
    """
    check_pages("values", values, pool, pages, positions, n_valid)
    width = values.shape[-1]
    _check_pages(pool, width)
    run = choose(backend, BACKENDS, backends(width, None, values.dtype)).write_pages
    return run(pool, pages, positions, n_valid, values)


def _check_pages(pool: Array, width: int) -> None:
    if CHUNK * width > pool.shape[1] * LANES:
        raise ValueError(
            f"pool: a page of {pool.shape[1]} lines cannot hold {CHUNK} tokens of width {width}"
        )
