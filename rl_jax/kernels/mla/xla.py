"""[P] Causal attention of packed rows in blocks, forward and backward, in plain XLA.

Absorbed: a query, a key and the cached entry of a token share one width, all heads read the same
entries, and the value is an entry's first `value_width` numbers (arXiv 2405.04434, sec. 2.1.2).
Expanded: every head has keys and values of its own. Rows go one after the other. Keys come in
blocks of 64 in the order of positions, and a block masked out whole changes no bit, so neither
packing nor cuts at multiples of 64 do, nor does skipping the blocks nothing of which is visible.
"""

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.mla import online
from rl_jax.kernels.mla.checks import check_heads, check_rows, check_tokens
from rl_jax.kernels.mla.spans import keys_seen, queries_seeing
from rl_jax.sharding import ROWS, TENSOR, degree, on_each_device

QUERIES = 256
"""So many queries, counted per head, make a block: what it carries stays in a CPU's cache while
keys are read seldom."""
FEWEST, MOST = 16, CHUNK
"""Bounds of a block's queries of one head. One of CHUNK holds one segment where all begin at
multiples of that, and so sees no block of another."""

_ROWS, _HEADS = PartitionSpec(ROWS), PartitionSpec(ROWS, None, TENSOR)


def attend_rows(
    q: Float[Array, "R L H W"],
    latents: Float[Array, "R S W"],
    segments: Int[Array, "R L"],
    *,
    value_width: int,
    scale: float,
    first: int | Int[Array, ""] = 0,
    key_segments: Int[Array, "R S"] | None = None,
) -> Float[Array, "R L H V"]:
    """Causal attention inside each segment of packed rows; zeros for padding (segment -1).

    L and S are multiples of 64. Queries are tokens `first`.. of the rows of S keys, first a
    multiple of 64; without `key_segments` both are the same tokens. Products add up in float32.
    """
    check_rows(q, latents, value_width)

    def run(q, latents, *tokens):
        return (_causal(q, latents, latents[..., :value_width], *tokens, scale),)

    return _attend(
        run, {"q": _HEADS, "latents": _ROWS}, (q, latents), segments, key_segments, first
    )


def attend_heads(
    q: Float[Array, "R L H A"],
    k: Float[Array, "R S G A"],
    v: Float[Array, "R S G V"],
    segments: Int[Array, "R L"],
    *,
    scale: float,
    first: int | Int[Array, ""] = 0,
    key_segments: Int[Array, "R S"] | None = None,
) -> Float[Array, "R L H V"]:
    """`attend_rows` where each head, or each group of H / G heads that lie side by side, has its
    own keys and values, of widths that may differ."""
    check_heads(q, k, v)

    def run(q, k, v, segments, key_segments, first):
        attend = _grouped if k.shape[2] < q.shape[2] else _causal
        return (attend(q, k, v, segments, key_segments, first, scale),)

    cuts = {"q": _HEADS, "k": _HEADS, "v": _HEADS}
    return _attend(run, cuts, (q, k, v), segments, key_segments, first)


def _attend(
    run: Callable[..., tuple[Array, ...]],
    cuts: dict[str, PartitionSpec],
    operands: tuple[Array, ...],
    segments: Array,
    key_segments: Array | None,
    first: int | Array,
) -> Array:
    """On a mesh each device takes its own rows and heads: a loop over rows that lie on several
    would gather them. Rows or heads that do not divide over it lie nowhere in parts."""
    key_segments = segments if key_segments is None else key_segments
    check_tokens(operands[0], operands[1], segments, key_segments, first)
    rows, heads = operands[0].shape[0], min(x.shape[2] for x in operands if x.ndim == 4)
    if not rows % prod(map(degree, ROWS)) and not heads % degree(TENSOR):
        tokens = {"segments": _ROWS, "key_segments": _ROWS, "first": PartitionSpec()}
        run = on_each_device(run, cuts | tokens, (_HEADS,))
    return run(*operands, segments, key_segments, jnp.asarray(first, jnp.int32))[0]


def _grouped(q, k, v, segments, key_segments, first, scale):
    """Each group of heads as a row of its own, whose keys all heads of the row share."""
    rows, length, heads, width = q.shape
    groups = k.shape[2]

    def apart(x: Array) -> Array:
        x = x.swapaxes(1, 2)
        return x.reshape(-1, *x.shape[2:])

    q = apart(q.reshape(rows, length, groups, heads // groups, width))
    tokens = (jnp.repeat(x, groups, 0) for x in (segments, key_segments))
    out = _causal(q, apart(k), apart(v), *tokens, first, scale)
    out = out.reshape(rows, groups, length, heads // groups, v.shape[-1]).swapaxes(1, 2)
    return out.reshape(rows, length, heads, v.shape[-1])


def block_size(heads: int, length: int) -> int:
    """Queries per head of a block: a power of two that divides `length`."""
    size = MOST
    while size > FEWEST and (size * heads > QUERIES or length % size):
        size //= 2
    return size


def _cut(x: Array, size: int) -> Array:
    """[R, L, ...] -> [R, L / size, (H,) size, ...]."""
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return x.swapaxes(2, 3) if x.ndim == 5 else x


def _joined(x: Array) -> Array:
    """The inverse of `_cut`."""
    x = x.swapaxes(2, 3) if x.ndim == 5 else x
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _visible(
    own: Int[Array, " B"], other: Int[Array, " C"], start: Array, key: Array
) -> Bool[Array, "B C"]:
    """What a block of queries, tokens start.., sees of block `key` of the keys."""
    row, column = start + jnp.arange(own.shape[0]), key * CHUNK + jnp.arange(CHUNK)
    return (own[:, None] == other) & (other >= 0) & (column <= row[:, None])


def _run(q, k, v, segments, key_segments, first, scale):
    return _forward(q, k, v, segments, key_segments, first, scale)[0]


def _forward(q, k, v, segments, key_segments, first, scale):
    """Each block of a row's queries over the blocks of keys it may see."""
    size = block_size(q.shape[2], q.shape[1])
    begin, end = keys_seen(segments, key_segments, first, size)
    queries, own = _cut(q, size), _cut(segments, size)
    keys, values = _cut(k, CHUNK), online.with_mass(_cut(v, CHUNK))
    other = _cut(key_segments, CHUNK)

    def row(operands):
        queries, own, keys, values, other, begin, end = operands

        def one(i):
            def step(j, carry):
                mask = _visible(own[i], other[j], first + i * size, j)
                return online.fold_values(carry, queries[i], keys[j], values[j], mask, scale)

            carry = online.empty(queries[i], v.shape[-1])
            carry = jax.lax.fori_loop(begin[i], end[i], step, carry)
            return online.finish(carry).astype(v.dtype), online.log_mass(carry)

        return jax.lax.map(one, jnp.arange(queries.shape[0]))

    made = jax.lax.map(row, (queries, own, keys, values, other, begin, end))
    out, log_mass = (checkpoint_name(x, online.KEPT) for x in (_joined(made[0]), made[1]))
    return out, (q, k, v, segments, key_segments, first, out, log_mass)


def _backward(scale, kept, d_out):
    """Weights are made again from the kept logarithm of their mass (arXiv 2205.14135, alg. 4).

    Each block of keys takes the blocks of queries that see it, so its own gradient is done after
    one visit.
    """
    q, k, v, segments, key_segments, first, out, log_mass = kept
    exact, size = log_mass.dtype, q.shape[1] // log_mass.shape[1]
    first = first + jnp.zeros_like(segments[0, 0])  # a constant is no jax.Array here
    begin, end = queries_seeing(segments, key_segments, first, size)
    inner = jnp.sum(d_out.astype(exact) * out.astype(exact), -1, keepdims=True)
    blocks = (*(_cut(x, size) for x in (q, d_out, inner, segments)), log_mass)
    blocks = blocks, tuple(_cut(x, CHUNK) for x in (k, v, key_segments)), (begin, end)

    def row(operands):
        (queries, d_outs, inner, own, log_mass), (keys, values, other), (begin, end) = operands

        def pair(i, j, carry):
            d_q, d_key, d_value = carry
            mask = _visible(own[i], other[j], first + i * size, j)
            weights = jnp.exp(online.scores(queries[i], keys[j]) * scale - log_mass[i])
            weights = jnp.where(mask, weights, 0.0)
            d_scores = weights * (online.scores(d_outs[i], values[j]) - inner[i])
            d_q = d_q.at[i].add(online.weighted(d_scores, keys[j]))
            d_key = d_key + _gathered(d_scores, queries[i], d_key.ndim == 3)
            return d_q, d_key, d_value + _gathered(weights, d_outs[i], d_value.ndim == 3)

        def column(d_q, j):
            carry = d_q, jnp.zeros(keys.shape[1:], exact), jnp.zeros(values.shape[1:], exact)
            carry = jax.lax.fori_loop(begin[j], end[j], lambda i, carry: pair(i, j, carry), carry)
            return carry[0], ((carry[1] * scale).astype(k.dtype), carry[2].astype(v.dtype))

        d_q, found = jax.lax.scan(
            column, jnp.zeros(queries.shape, exact), jnp.arange(keys.shape[0])
        )
        return (d_q * scale).astype(q.dtype), *found

    d_q, d_k, d_v = (_joined(x) for x in jax.lax.map(row, blocks))
    return d_q, d_k, d_v, None, None, None


def _gathered(
    weights: Float[Array, "H L C"], x: Float[Array, "H L W"], per_head: bool
) -> Float[Array, "*own C W"]:
    """What a block of keys receives from its queries, over all heads unless `per_head`."""
    heads = "h" if per_head else ""
    weights, kind = weights.astype(x.dtype), weights.dtype
    return jnp.einsum(f"hlc,hlw->{heads}cw", weights, x, preferred_element_type=kind)


_causal = jax.custom_vjp(_run, nondiff_argnums=(6,))
_causal.defvjp(_forward, _backward)
