"""[P] The mathematics of a chunk of 64 tokens: sums of log-decays, decayed products, the inverse.

Leading axes are free. Rows come in blocks of 16. Every exponent is a sum of log-decays over a range
of rows, added up term by term: no difference of long cumulative sums, so nothing cancels. A range
never reaches past the row whose output it enters, so no output sees a later gate, even by rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_jax.arrays import CHUNK, Array

BLOCK = 16
"""Rows of a diagonal block; 15 steps of the strongest bounded decay must fit float32's exponent."""
STRONGEST_BOUND = 5.82
"""|lower bound| of a gate must be below: 15 steps of it are e^-87.3, float32's smallest normal."""
HALF_SPAN = 2.0**54
"""exp of half of 15 steps at the gate's bound of -5: it centres the factors of a diagonal block, as
a power of two so that nothing is rounded."""


def contract(a: Array, b: Array, over_a: int, over_b: int) -> Array:
    """Matrix product over axis `over_a` of a and `over_b` of b (-1 or -2).

    Leading axes are equal.
    """
    batch = tuple(range(a.ndim - 2))
    over = ((a.ndim + over_a,), (b.ndim + over_b,))
    return jax.lax.dot_general(a, b, (over, (batch, batch)), precision=jax.lax.Precision.HIGHEST)


def blocks(x: Float[Array, "*B C K"]) -> Float[Array, "*B blocks 16 K"]:
    """Rows in blocks of 16."""
    return x.reshape(*x.shape[:-2], -1, BLOCK, x.shape[-1])


def border_sums(x: Float[Array, "*B n K"], from_end: bool) -> Float[Array, "*B n+1 K"]:
    """At each border of n rows, the sum over all rows before it, or after it if `from_end`.

    One row after the other: XLA's own cumulative sum costs three times as much on a CPU.
    """
    return _border_sums(x, from_end)


def _sums(x, from_end):
    rows = range(x.shape[-2])
    sums = [jnp.zeros_like(x[..., 0, :])]
    for row in reversed(rows) if from_end else rows:
        sums.append(jax.lax.optimization_barrier(sums[-1] + x[..., row, :]))
    return jnp.stack(sums[::-1] if from_end else sums, -2)


def _sums_forward(x, from_end):
    return _sums(x, from_end), None


def _sums_backward(from_end, _, cotangent):
    if from_end:
        return (border_sums(cotangent[..., :-1, :], False)[..., 1:, :],)
    return (border_sums(cotangent[..., 1:, :], True)[..., :-1, :],)


_border_sums = jax.custom_vjp(_sums, nondiff_argnums=(1,))
_border_sums.defvjp(_sums_forward, _sums_backward)


class Decays(NamedTuple):
    """Sums of log-decays in a chunk; the first two and the last by row, the others by block."""

    within: Float[Array, "*B 4 16 K"]
    """After the block's first row up to the row itself."""
    rest: Float[Array, "*B 4 16 K"]
    """After the row itself to the block's end."""
    before: Float[Array, "*B 4 K"]
    """Over all earlier blocks."""
    after: Float[Array, "*B 4 K"]
    """Over all later blocks."""
    total: Float[Array, "*B 4 K"]
    """Over the block."""
    to_row: Float[Array, "*B 4 16 K"]
    """From the block's first row up to the row itself."""


def decays(g: Float[Array, "*B 4 16 K"]) -> Decays:
    """All sums of a chunk's log-decays that its products need."""
    within = border_sums(g[..., 1:, :], False)
    to_row = within + g[..., :1, :]
    total = to_row[..., -1, :]
    before, after = border_sums(total[..., :-1, :], False), border_sums(total[..., 1:, :], True)
    return Decays(within, border_sums(g[..., 1:, :], True), before, after, total, to_row)


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


def aged(x: Array, log: Array, scale: float) -> Array:
    """x exp(log) scale, where `log` may have 1 for an axis of x.

    Its slope in `log` is its value: formed step by step it would pass through numbers too small.
    """
    return _aged(x, log, scale)


def _age(x, log, scale):
    return x * (jnp.exp(log) * scale)


def _age_forward(x, log, scale):
    factor = jnp.exp(log) * scale
    return x * factor, (x, factor)


def _age_backward(scale, saved, cotangent):
    x, factor = saved
    spread = [axis for axis in range(x.ndim) if factor.shape[axis] < x.shape[axis]]
    return cotangent * factor, jnp.sum(cotangent * (x * factor), spread, keepdims=True)


_aged = jax.custom_vjp(_age, nondiff_argnums=(2,))
_aged.defvjp(_age_forward, _age_backward)


def _bounded_diagonal(rows: Array, keys: Array, within: Array) -> Array:
    """[*B, 4, 2, 16, K] rows against [*B, 4, 16, K] keys of their block -> [*B, 4, 2, 16, 16]."""
    left = aged(rows, within[..., None, :, :], HALF_SPAN)
    right = aged(keys, -within, 1 / HALF_SPAN)
    scores = contract(merge(left, -3, -2), right, -1, -1)
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
    rows_aged = rows * jnp.exp(sums.to_row)[..., None, :, :]
    return Factors(rows, keys, rows_aged, keys * jnp.exp(sums.rest))


def scores(
    of: Factors, g: Float[Array, "*B 4 16 K"], sums: Decays, bounded: bool
) -> tuple[Levels, Levels]:
    """A[i, j] = sum_d rows[i, d] keys[j, d] exp(sum of g over (j, i]) for the two kinds of rows.

    The first keeps j <= i, the second j < i. Blocks off the diagonal are anchored at the border
    between rows and keys, where both exponents are <= 0; a block on the diagonal at its first row.
    """
    if bounded:
        diagonal = _bounded_diagonal(of.rows, of.keys, sums.within)
    else:
        diagonal = _exact_diagonal(of.rows, of.keys, g)
    pairs = _pairs(of)
    halves = _halves(of, sums.total)
    kinds = []
    for kind, highest in enumerate((0, -1)):
        kept = np.tril(np.ones((BLOCK, BLOCK), bool), highest)
        on, *below = (x[..., kind, :, :] for x in (diagonal, pairs, halves))
        kinds.append(Levels(jnp.where(kept, on, 0.0), *below))
    return kinds[0], kinds[1]


def _pairs(of: Factors) -> Float[Array, "*B 2 2 16 16"]:
    """Rows of blocks 1 and 3 against keys of blocks 0 and 2, by pair and kind."""
    rows, keys = of.rows_aged[..., 1::2, :, :, :], of.keys_aged[..., 0::2, :, :]
    found = contract(merge(rows, -3, -2), keys, -1, -1)
    return found.reshape(*rows.shape[:-1], BLOCK)


def _halves(of: Factors, total: Array) -> Float[Array, "*B 1 2 32 32"]:
    """Rows of blocks 2 and 3 against keys of blocks 0 and 1, by kind."""
    none = jnp.zeros_like(total[..., :1, :])
    to_block = jnp.exp(jnp.concatenate([none, total[..., 2:3, :]], -2))
    to_middle = jnp.exp(jnp.concatenate([total[..., 1:2, :], none], -2))
    rows = of.rows_aged[..., 2:, :, :, :] * to_block[..., None, None, :]
    keys = of.keys_aged[..., :2, :, :] * to_middle[..., None, :]
    found = contract(merge(rows, -4, -2), merge(keys, -3, -2), -1, -1)
    by_block = found.reshape(*rows.shape[:-1], 2 * BLOCK)
    return merge(jnp.swapaxes(by_block, -4, -3), -3, -2)[..., None, :, :, :]


def _invert_blocks(lower: Float[Array, "*B 16 16"]) -> Float[Array, "*B 16 16"]:
    """(I + lower)^-1 for strictly lower matrices, one row after the other."""
    unit = np.eye(BLOCK, dtype=lower.dtype)
    rows = [jnp.broadcast_to(unit[0], (*lower.shape[:-2], BLOCK))]
    for i in range(1, BLOCK):
        known = sum(lower[..., i, j, None] * rows[j] for j in range(i))
        rows.append(jax.lax.optimization_barrier(unit[i] - known))
    return jnp.stack(rows, -2)


@jax.custom_vjp
def unit_lower_inverse(lower: Levels) -> Float[Array, "*B C C"]:
    """(I + lower)^-1 for a strictly lower triangular matrix of 64 rows.

    Blocks of 16 by substitution, then two doublings; never powers of `lower`, which explode on
    correlated keys.
    """
    inverse = _invert_blocks(lower.diagonal)
    for below in (lower.pairs, lower.halves):
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _join(inverse, -contract(contract(second, below, -1, -2), first, -1, -2))
    return inverse[..., 0, :, :]


def _inverse_forward(lower):
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse, cotangent):
    """dL = -stril(X^T dX X^T)."""
    left = contract(inverse, cotangent, -2, -2)
    lower = split(-contract(left, inverse, -1, -1))
    mask = np.tril(np.ones((BLOCK, BLOCK), bool), -1)
    return (lower._replace(diagonal=jnp.where(mask, lower.diagonal, 0.0)),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
