"""[P] Kimi delta attention in plain XLA: chunks of 64 tokens, and one token for decode.

Everything is float32. Every exponent below is a sum of log-decays over a range of rows, made by a
product with a 0/1 matrix: no difference of long cumulative sums, so nothing cancels. A range never
reaches past the row whose output it enters, so no output sees a later gate, even by rounding. What
a chunk gives depends on its inputs and the entering state alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from rl_jax.arrays import CHUNK, Array

BLOCK = 16
"""Rows of a diagonal block; 15 steps of the strongest decay must fit float32's exponent."""
HALF_SPAN = 2.0**54
"""exp of half of 15 steps at the gate's bound of -5: it centres the factors of a diagonal block, as
a power of two so that nothing is rounded."""
SHORT = 16
"""Up to so many tokens at once, one after the other is faster than a chunk."""
EXACT = jax.lax.Precision.HIGHEST


def bounded_gate(
    x: Float[Array, "*B H K"],
    rate_log: Float[Array, " H"],
    bias: Float[Array, "H K"],
    lower_bound: float,
) -> Float[Array, "*B H K"]:
    """Log-decay `lower_bound * sigmoid(exp(rate_log) (x + bias))`, in (lower_bound, 0)."""
    return lower_bound * jax.nn.sigmoid(jnp.exp(rate_log)[:, None] * (x + bias))


def _ranges() -> np.ndarray:
    """float32[5, C, C]: which tokens' log-decays each row sums.

    0: after its block's first row up to itself. 1, 2: between itself and the first row of the right
    half of its pair of 16 (32) row blocks, whichever is earlier excluded. 3: the chunk's first row
    up to itself. 4: after itself to the chunk's end.
    """
    row, token = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]

    def between(a, b):
        return (token > a) & (token <= b)

    def around(half):
        middle = row // (2 * half) * (2 * half) + half
        return between(np.minimum(row, middle), np.maximum(row, middle))

    first = row // BLOCK * BLOCK
    parts = [between(first, row), around(16), around(32), token <= row, token > row]
    return np.stack(parts).astype(np.float32)


RANGES = _ranges()


def _join(diagonal: Array, below: Array) -> Array:
    """[..., 2m, b, b] diagonal blocks and [..., m, b, b] below them -> [..., m, 2b, 2b]."""
    top = jnp.concatenate([diagonal[..., 0::2, :, :], jnp.zeros_like(below)], -1)
    bottom = jnp.concatenate([below, diagonal[..., 1::2, :, :]], -1)
    return jnp.concatenate([top, bottom], -2)


def _blocks(x: Array, size: int) -> Array:
    """[..., C, K] -> [..., C / size, size, K]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _dot(spec: str, *operands: Array) -> Array:
    return jnp.einsum(spec, *operands, precision=EXACT)


def _scores(rows: Array, keys: Array, sums: tuple[Array, ...], include_self: bool) -> Array:
    """A[i, j] = sum_d rows[i, d] keys[j, d] exp(sum of g over (j, i]) for j < i (or <=), else 0."""
    within, *around = sums
    left = _blocks(rows * (jnp.exp(within) * HALF_SPAN), BLOCK)
    right = _blocks(keys * (jnp.exp(-within) / HALF_SPAN), BLOCK)
    mask = np.tril(np.ones((BLOCK, BLOCK), bool), 0 if include_self else -1)
    scores = jnp.where(mask, _dot("...ik,...jk->...ij", left, right), 0.0)
    for half, around_half in zip((16, 32), around, strict=True):
        decay = jnp.exp(around_half)
        left = _blocks(rows * decay, half)[..., 1::2, :, :]
        right = _blocks(keys * decay, half)[..., 0::2, :, :]
        scores = _join(scores, _dot("...ik,...jk->...ij", left, right))
    return scores[..., 0, :, :]


def _invert_blocks(lower: Array) -> Array:
    """(I + lower)^-1 for strictly lower [..., 16, 16], by the doubling ladder X -= X L_b X."""
    index = np.arange(BLOCK)
    inverse = jnp.eye(BLOCK, dtype=lower.dtype)
    for half in (1, 2, 4, 8):
        pair = index // (2 * half)
        mask = (pair[:, None] == pair) & (index[:, None] // half > index // half)
        step = jnp.where(mask, lower, 0.0)
        if half > 1:
            step = _dot("...ij,...jk,...kl->...il", inverse, step, inverse)
        inverse = inverse - step
    return inverse


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + lower)^-1 for a strictly lower triangular matrix of 64 rows.

    Doubling block sizes, never powers of `lower`: those explode on correlated keys.
    """

    def diagonal(size, below):
        starts = range(0, CHUNK, 2 * size if below else size)
        shift = size if below else 0
        tiles = [lower[..., s + shift : s + shift + size, s : s + size] for s in starts]
        return jnp.stack(tiles, -3)

    inverse = _invert_blocks(diagonal(BLOCK, False))
    for size in (16, 32):
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _dot("...ij,...jk->...ik", second, diagonal(size, True))
        inverse = _join(inverse, -_dot("...ij,...jk->...ik", below, first))
    return inverse[..., 0, :, :]


def _inverse_forward(lower):
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    """dL = -stril(X^T dX X^T)."""
    left = _dot("...ji,...jk->...ik", inverse, cotangent)
    full = -_dot("...ij,...kj->...ik", left, inverse)
    return (jnp.where(np.tril(np.ones((CHUNK, CHUNK), bool), -1), full, 0.0),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _to_chunks(x: Array) -> Array:
    """[R, L, H, K] -> [N, R, H, C, K].

    The barrier keeps XLA's CPU backend from fusing arithmetic into a strided copy.
    """
    rows, length, heads, width = x.shape
    x = x.reshape(rows, length // CHUNK, CHUNK, heads, width).transpose(1, 0, 3, 2, 4)
    return jax.lax.optimization_barrier(x)


def chunked(
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H K"],
    beta: Float[Array, "R L H"],
    state: Float[Array, "R H K V"] | None = None,
    reset: Bool[Array, "R N"] | None = None,
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"]]:
    """Outputs and final state of R packed rows, N = L / 64 chunks each.

    q and k L2-normalised, g in natural log within [-5, 0], padding tokens k = v = beta = g = 0.
    Where `reset` is true the state is zeroed before the chunk. Equations: arXiv 2510.26692, sec. 3.
    """
    rows, length, heads, width = q.shape
    if state is None:
        state = jnp.zeros((rows, heads, width, v.shape[-1]), v.dtype)
    if reset is None:
        reset = jnp.zeros((rows, length // CHUNK), bool)
    q, k, v, g = (_to_chunks(x) for x in (q * width**-0.5, k, v, g))
    beta = _to_chunks(beta[..., None])
    *sums, prefix, suffix = (_dot("ct,nrhtk->nrhck", jnp.asarray(m), g) for m in RANGES)
    causal = _scores(q, k, tuple(sums), include_self=True)
    lower = beta * _scores(k, k, tuple(sums), include_self=False)
    inverse = unit_lower_inverse(lower)
    decay = jnp.exp(prefix)
    read = _dot("nrhij,nrhjk->nrhik", inverse, beta * k * decay)
    write = _dot("nrhij,nrhjv->nrhiv", inverse, beta * v)

    def step(state, chunk):
        reset, read, write, keys, keep = chunk
        state = jnp.where(reset[:, None, None, None], 0.0, state)
        update = write - _dot("rhck,rhkv->rhcv", read, state)
        after = keep[..., None] * state + _dot("rhck,rhcv->rhkv", keys, update)
        return after, (state, update)

    chunks = (reset.T, read, write, k * jnp.exp(suffix), decay[..., -1, :])
    final, (states, updates) = jax.lax.scan(step, state, chunks)
    out = _dot("nrhck,nrhkv->nrhcv", q * decay, states)
    out = out + _dot("nrhij,nrhjv->nrhiv", causal, updates)
    return out.transpose(1, 0, 3, 2, 4).reshape(rows, length, heads, -1), final


def recurrent_step(
    q: Float[Array, "R H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H V"],
    g: Float[Array, "R H K"],
    beta: Float[Array, "R H"],
    state: Float[Array, "R H K V"],
) -> tuple[Float[Array, "R H V"], Float[Array, "R H K V"]]:
    """One token per request, the recurrence of `reference.recurrent`."""
    state = state * jnp.exp(g)[..., None]
    update = beta[..., None] * (v - jnp.sum(state * k[..., None], -2))
    state = state + k[..., None] * update[..., None, :]
    return jnp.sum(state * q[..., None], -2) * q.shape[-1] ** -0.5, state


def recurrent(
    q: Float[Array, "R n H K"],
    k: Float[Array, "R n H K"],
    v: Float[Array, "R n H V"],
    g: Float[Array, "R n H K"],
    beta: Float[Array, "R n H"],
    state: Float[Array, "R H K V"],
) -> tuple[Float[Array, "R n H V"], Float[Array, "R H K V"]]:
    """A few tokens per request, one after the other: decode, and what is too short for a chunk."""

    def step(state, token):
        q, k, v, g, beta = token
        out, state = recurrent_step(q, k, v, g, beta, state)
        return state, out

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state
