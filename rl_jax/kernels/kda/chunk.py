"""[P] The mathematics of a chunk of 64 tokens: sums of log-decays, decayed products, the inverse.

Leading axes are free. Rows come in blocks of 16. Every exponent is a sum of log-decays over a range
of rows, by a product with a 0/1 matrix: no difference of long cumulative sums, so nothing cancels.
A range never reaches past the row whose output it enters, so no output sees a later gate, even by
rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda.anchor import BLOCK, CENTRE

BLOCKS = CHUNK // BLOCK
HALF_SPAN = 2.0**CENTRE


def turned(x: Float[Array, "*B m n"]) -> Float[Array, "*B n m"]:
    """Transposed, also in memory: XLA's fast products on a CPU take a left factor by rows only."""
    return jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


def _contracted(a: Array, b: Array, over_b: int) -> Array:
    batch = tuple(range(a.ndim - 2))
    over = ((a.ndim - 1,), (b.ndim + over_b,))
    return jax.lax.dot_general(a, b, (over, (batch, batch)), precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def product(a: Float[Array, "*B m k"], b: Float[Array, "*B k n"]) -> Float[Array, "*B m n"]:
    """a b."""
    return _contracted(a, b, -2)


@jax.custom_vjp
def product_by_rows(a: Float[Array, "*B m k"], b: Float[Array, "*B n k"]) -> Float[Array, "*B m n"]:
    """a b^T."""
    return _contracted(a, b, -1)


product.defvjp(
    lambda a, b: (_contracted(a, b, -2), (a, b)),
    lambda saved, d: (product_by_rows(d, saved[1]), product(turned(saved[0]), d)),
)
product_by_rows.defvjp(
    lambda a, b: (_contracted(a, b, -1), (a, b)),
    lambda saved, d: (product(d, saved[1]), product(turned(d), saved[0])),
)


def blocks(x: Float[Array, "*B C K"]) -> Float[Array, "*B blocks 16 K"]:
    """Rows in blocks of 16."""
    return x.reshape(*x.shape[:-2], -1, BLOCK, x.shape[-1])


def _summed(x: Float[Array, "*B n K"], rows: np.ndarray) -> Float[Array, "*B m K"]:
    """Of each m, the sum of those n rows where `rows` [m, n] is 1.

    A product: zeros add nothing, so a sum's bits depend on its own terms alone.
    """
    return _sums(x, Rows(rows))


class Rows:
    """A 0/1 matrix known when traced, which jax takes for no array."""

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries


def _sums(x, rows):
    matrix = jnp.asarray(rows.entries, x.dtype)
    return _contracted(jnp.broadcast_to(matrix, (*x.shape[:-2], *matrix.shape)), x, -2)


_sums = jax.custom_vjp(_sums, nondiff_argnums=(1,))
_sums.defvjp(
    lambda x, rows: (_sums(x, rows), None),
    lambda rows, _, d: (_sums(d, Rows(rows.entries.T)),),
)


class Decay(NamedTuple):
    """Over a range of rows."""

    log: Array
    """The sum of log-decays."""
    factor: Array
    """exp of it, once for all its uses, through which no slope goes: see `aged`."""


class Decays(NamedTuple):
    """Of a chunk, [*B, 4, 16, K] by row and [*B, 4, K] by block."""

    to_row: Decay
    """From the block's first row up to the row itself."""
    rest: Decay
    """After the row itself to the block's end."""
    within: Decay | None
    """After the block's first row up to the row itself; for bounded gates only."""
    before: Decay
    """Over all earlier blocks."""
    after: Decay
    """Over all later blocks."""
    to_middle: Decay
    """From the row's block, excluded, to the middle of the chunk, or from there to it."""
    whole: Decay
    """Over the chunk, [*B, 1, K]."""


def _cut(log: Array, sizes: tuple[int, ...]) -> list[Decay]:
    """Rows of sums, `sizes` for each kind."""
    factor = jax.lax.optimization_barrier(jnp.exp(jax.lax.stop_gradient(log)))
    ends = np.cumsum(sizes)
    return [
        Decay(log[..., end - size : end, :], factor[..., end - size : end, :])
        for size, end in zip(sizes, ends, strict=True)
    ]


def decays(g: Float[Array, "*B 4 16 K"], bounded: bool) -> Decays:
    """All decays of a chunk that its products need."""
    row, of = np.ogrid[:BLOCK, :BLOCK]
    ranges = [of <= row, of > row, (of <= row) & (of > 0)][: 3 if bounded else 2]
    by_row = _summed(g, np.concatenate(ranges))
    to_row, rest, *within = _cut(by_row, (BLOCK,) * len(ranges))
    total = to_row.log[..., -1, :]
    row, of = np.ogrid[:BLOCKS, :BLOCKS]
    to_middle = ((of > row) & (of < 2)) | ((of < row) & (of >= 2))
    by_block = _summed(total, np.concatenate([of < row, of > row, to_middle, of[:1] >= 0]))
    borders = _cut(by_block, (BLOCKS, BLOCKS, BLOCKS, 1))
    return Decays(to_row, rest, within[0] if bounded else None, *borders)


class Levels(NamedTuple):
    """A lower triangular matrix of 64 rows in three parts; a further axis may tell matrices apart.

    Rows and columns of a part are counted inside its blocks.
    """

    diagonal: Float[Array, "*B 4 16 16"]
    pairs: Float[Array, "*B 2 16 16"]
    """Rows of blocks 1 and 3 against columns of blocks 0 and 2."""
    halves: Float[Array, "*B 1 32 32"]
    """Rows of blocks 2 and 3 against columns of blocks 0 and 1."""


def _join(diagonal: Array, below: Array) -> Array:
    """[..., 2m, b, b] diagonal blocks and [..., m, b, b] below them -> [..., m, 2b, 2b]."""
    top = jnp.concatenate([diagonal[..., 0::2, :, :], jnp.zeros_like(below)], -1)
    bottom = jnp.concatenate([below, diagonal[..., 1::2, :, :]], -1)
    return jnp.concatenate([top, bottom], -2)


def assemble(levels: Levels) -> Float[Array, "*B C C"]:
    """The matrix itself."""
    return _join(_join(levels.diagonal, levels.pairs), levels.halves)[..., 0, :, :]


def split(matrix: Float[Array, "*B C C"]) -> Levels:
    """`assemble` undone: what lies above the diagonal blocks is left out."""

    def tiles(size: int, shift: int, step: int) -> Array:
        starts = range(0, CHUNK, step)
        found = [matrix[..., s + shift : s + shift + size, s : s + size] for s in starts]
        return jnp.stack(found, -3)

    return Levels(tiles(16, 0, 16), tiles(16, 16, 32), tiles(32, 32, 64))


def merge(x: Array, first: int, last: int) -> Array:
    """Axes `first` to `last`, both negative and included, as one."""
    shape = x.shape
    end = x.ndim + last + 1
    return x.reshape(*shape[: x.ndim + first], -1, *shape[end:])


@jax.custom_vjp
def unstacked(x: Float[Array, "*B 2 m K"]) -> tuple[Array, Array]:
    """The two along the last axis but two; its slope is one stack, not a sum of two padded."""
    return x[..., 0, :, :], x[..., 1, :, :]


unstacked.defvjp(lambda x: (unstacked(x), None), lambda _, cotangents: (jnp.stack(cotangents, -3),))


def aged(x: Array, decay: Decay, scale: float = 1.0) -> Array:
    """x exp(log) scale, where `decay` may have 1 for an axis of x.

    Its slope in the log is its value: formed step by step it would pass through numbers too small.
    """
    return _aged(x, decay, scale)


def _age(x, decay, scale):
    return x * (decay.factor * scale)


def _age_forward(x, decay, scale):
    return _age(x, decay, scale), (x, decay.factor)


def _age_backward(scale, saved, cotangent):
    x, factor = saved
    factor = factor * scale
    # Whole, for two uses: XLA would write out each of its terms.
    cotangent = jax.lax.optimization_barrier(cotangent)
    spread = [axis for axis in range(x.ndim) if factor.shape[axis] < x.shape[axis]]
    d_log = cotangent * (x * factor)
    for axis in spread:
        d_log = _folded(d_log, axis)
    return cotangent * factor, Decay(d_log, jnp.zeros_like(factor))


def _folded(x: Array, axis: int) -> Array:
    """The sum over an axis, which stays; of two by an addition: a reduction is slower on a CPU."""
    if x.shape[axis] == 2:
        first, second = (jax.lax.slice_in_dim(x, n, n + 1, axis=axis) for n in (0, 1))
        return first + second
    return jnp.sum(jax.lax.optimization_barrier(x), axis, keepdims=True)


_aged = jax.custom_vjp(_age, nondiff_argnums=(2,))
_aged.defvjp(_age_forward, _age_backward)


def along(decay: Decay, axis: int) -> Decay:
    """With an axis of 1 more."""
    return Decay(*(jnp.expand_dims(x, axis) for x in decay))


def _bounded_diagonal(rows: Array, keys: Array, within: Decay) -> Array:
    """[*B, 4, 2, 16, K] rows against [*B, 4, 16, K] keys of their block -> [*B, 4, 2, 16, 16]."""
    left = aged(rows, along(within, -3), HALF_SPAN)
    right = aged(keys, Decay(-within.log, 1 / within.factor), 1 / HALF_SPAN)
    scores = product_by_rows(merge(left, -3, -2), right)
    return scores.reshape(*rows.shape[:-1], BLOCK)


def _exact_diagonal(rows: Array, keys: Array, g: Array) -> Array:
    """The same for decays of any strength: element by element, one diagonal after the other."""

    def step(carry, _):
        """`keys` and `g` come from as many rows above as `decay` sums gates, 0 at first."""
        decay, keys, g = carry
        aged = keys * jnp.exp(decay)
        products = jnp.sum(rows * aged[..., None, :, :], -1)
        return (decay + g, jnp.roll(keys, 1, -2), jnp.roll(g, 1, -2)), products

    start = (jnp.zeros_like(g), keys, g)
    _, diagonals = jax.lax.scan(step, start, length=BLOCK)
    row, column, back = np.ogrid[:BLOCK, :BLOCK, :BLOCK]
    place = jnp.asarray(row - column == back, g.dtype)
    return jnp.einsum("d...i,ijd->...ij", diagonals, place, precision=jax.lax.Precision.HIGHEST)


class Factors(NamedTuple):
    """Rows and keys of a chunk, as they are and aged to the borders of their blocks."""

    rows: Float[Array, "*B 4 2 16 K"]
    """Two kinds of rows."""
    keys: Float[Array, "*B 4 16 K"]
    rows_aged: Float[Array, "*B 4 2 16 K"]
    """By the decays from the block's first row up to the row."""
    keys_aged: Float[Array, "*B 4 16 K"]
    """By the decays after the row to the block's end."""


def factors(
    rows: Float[Array, "*B 4 2 16 K"], keys: Float[Array, "*B 4 16 K"], sums: Decays
) -> Factors:
    """Rows and keys as they are, and aged."""
    return Factors(rows, keys, aged(rows, along(sums.to_row, -3)), aged(keys, sums.rest))


def scores(of: Factors, g: Float[Array, "*B 4 16 K"], sums: Decays) -> tuple[Levels, Levels]:
    """A[i, j] = sum_d rows[i, d] keys[j, d] exp(sum of g over (j, i]) for the two kinds of rows.

    The first keeps j <= i, the second j < i. Blocks off the diagonal are anchored at the border
    between rows and keys, where both exponents are <= 0; a block on the diagonal at its first row.
    """
    if sums.within is None:
        diagonal = _exact_diagonal(of.rows, of.keys, g)
    else:
        diagonal = _bounded_diagonal(of.rows, of.keys, sums.within)
    pairs = _pairs(of)
    halves = _halves(of, sums.to_middle)
    kinds = []
    for kind, highest in enumerate((0, -1)):
        kept = np.tril(np.ones((BLOCK, BLOCK), bool), highest)
        on, *below = (x[..., kind, :, :] for x in (diagonal, pairs, halves))
        kinds.append(Levels(jnp.where(kept, on, 0.0), *below))
    return kinds[0], kinds[1]


def _pairs(of: Factors) -> Float[Array, "*B 2 2 16 16"]:
    """Rows of blocks 1 and 3 against keys of blocks 0 and 2, by pair and kind."""
    rows, keys = of.rows_aged[..., 1::2, :, :, :], of.keys_aged[..., 0::2, :, :]
    found = product_by_rows(merge(rows, -3, -2), keys)
    return found.reshape(*rows.shape[:-1], BLOCK)


def _halves(of: Factors, to_middle: Decay) -> Float[Array, "*B 1 2 32 32"]:
    """Rows of blocks 2 and 3 against keys of blocks 0 and 1, by kind."""
    first, second = (
        Decay(*(x[..., here, :] for x in to_middle)) for here in (np.s_[:2], np.s_[2:])
    )
    rows = aged(of.rows_aged[..., 2:, :, :, :], along(along(second, -2), -2))
    keys = aged(of.keys_aged[..., :2, :, :], along(first, -2))
    found = product_by_rows(merge(rows, -4, -2), merge(keys, -3, -2))
    by_block = found.reshape(*rows.shape[:-1], 2 * BLOCK)
    return merge(jnp.swapaxes(by_block, -4, -3), -3, -2)[..., None, :, :, :]


def _invert_blocks(lower: Float[Array, "*B 16 16"]) -> Float[Array, "*B 16 16"]:
    """(I + lower)^-1 for strictly lower matrices, by doublings: X <- X - X L_b X.

    L_b is what lies below the diagonal blocks of b rows in those of 2b. One row after the other is
    as fast and as exact, but a loop per row to compile.
    """
    index = np.arange(BLOCK)
    lower = jax.lax.optimization_barrier(lower)
    inverse = jnp.eye(BLOCK, dtype=lower.dtype)
    for half in (1, 2, 4, 8):
        pair = index // (2 * half)
        below = (pair[:, None] == pair) & (index[:, None] // half > index // half)
        step = jnp.where(below, lower, 0.0)
        if half > 1:
            step = product(product(inverse, step), inverse)
        inverse = jax.lax.optimization_barrier(inverse - step)
    return inverse


def unit_lower_inverse(lower: Levels) -> Float[Array, "*B C C"]:
    """(I + lower)^-1 for a strictly lower triangular matrix of 64 rows.

    By doublings from blocks of 16; never by powers of `lower`, which explode on correlated keys.
    """
    inverse = _invert_blocks(lower.diagonal)
    for below in (lower.pairs, lower.halves):
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _join(inverse, -product(product(second, below), first))
    return inverse[..., 0, :, :]


@jax.custom_vjp
def solve(
    inverse: Float[Array, "*B C C"],
    lower: Levels,
    a: Float[Array, "*B C m"],
    b: Float[Array, "*B C n"],
) -> tuple[Float[Array, "*B C m"], Float[Array, "*B C n"]]:
    """x and y of (I + lower) x = a, (I + lower) y = b.

    `inverse` is that of `lower`, known already: slopes go through `lower` alone.
    """
    return _solve_forward(inverse, lower, a, b)[0]


def _solve_forward(inverse, lower, a, b):
    del lower
    solutions = product(inverse, a), product(inverse, b)
    return solutions, (inverse, solutions)


def _solve_backward(saved, cotangents):
    """da = X^T dx, dL = -stril(da x^T + db y^T)."""
    inverse, (x, y) = saved
    back = turned(inverse)
    d_a, d_b = (product(back, cotangent) for cotangent in cotangents)
    d_lower = split(-product_by_rows(d_a, x) - product_by_rows(d_b, y))
    mask = np.tril(np.ones((BLOCK, BLOCK), bool), -1)
    d_lower = d_lower._replace(diagonal=jnp.where(mask, d_lower.diagonal, 0.0))
    return jnp.zeros_like(inverse), d_lower, d_a, d_b


solve.defvjp(_solve_forward, _solve_backward)
