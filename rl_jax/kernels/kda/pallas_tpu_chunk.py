"""[P] What the TPU kernels of Kimi delta attention do with one chunk: sums, products, the inverse.

Values of one head are [64, K or V]; the state is kept turned, [V, K], so that a decay of its keys
is a row. A pair of heads lies side by side in the 128 lanes of a register, [64, 2 x 64].

All exponents are sums of log-decays over a range of rows, never differences of longer sums. Rows
meet keys in halves of 64, 32, ... rows: a row of the right half is aged from the half's first row
up to itself, a key of the left half from itself to the same border, so exponents are <= 0 and no
output sees a later gate. With a bound, diagonal blocks of 16 rows follow, anchored at their first
row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda.anchor import BLOCK, CENTRE

PAIR = 2 * CHUNK
GROUP = 8
"""Chunks per group: the backward pass keeps the state that enters one, and goes through it again
on the chip."""
VMEM_LIMIT = 48 * 2**20
"""Bytes; the chips have 64 MiB or more."""
Product = Callable[[Array, Array, int, int], Array]


class Form(NamedTuple):
    """What a chunk's arithmetic depends on."""

    bounded: bool
    rounded: bool
    """Operands are bfloat16."""

    @property
    def halves(self) -> tuple[int, ...]:
        return (32, 16) if self.bounded else (32, 16, 8, 4, 2, 1)

    @property
    def sums(self) -> int:
        """To the row, after the row, one per half, within a diagonal block."""
        return 2 + len(self.halves) + self.bounded

    def exact(self, a: Array, b: Array, over_a: int, over_b: int) -> Array:
        """Product over axis `over_a` of a and `over_b` of b; operands in three bfloat16 parts.

        In two, with three products, where the inputs had one.
        """
        return _dot(a, b, over_a, over_b, lax.Precision.HIGH if self.rounded else HIGHEST)

    def coarse(self, a: Array, b: Array, over_a: int, over_b: int) -> Array:
        """The same for what only enters an output: one product of bfloat16 where inputs are."""
        if self.rounded:
            return _dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), over_a, over_b, None)
        return _dot(a, b, over_a, over_b, HIGHEST)


HIGHEST = lax.Precision.HIGHEST


def _dot(a, b, over_a, over_b, precision):
    over = ((over_a,), (over_b,)), ((), ())
    return lax.dot_general(a, b, over, precision=precision, preferred_element_type=jnp.float32)


def pair_of(ref: Any, first: int) -> tuple[Array, Array]:
    """Heads `first` and `first + 1` of a block [1, 64, heads, width], in float32."""
    _, rows, heads, width = ref.shape
    if ref.dtype == jnp.float32:
        flat = ref.reshape(rows * heads, width)
        one, two = (flat[pl.ds(first + i, rows, stride=heads)] for i in (0, 1))
        return one, two
    words = ref.bitcast(jnp.uint32).reshape(rows * heads // 2, width)
    both = words[pl.ds(first // 2, rows, stride=heads // 2)]
    low, high = both << 16, both & jnp.uint32(0xFFFF0000)
    return pltpu.bitcast(low, jnp.float32), pltpu.bitcast(high, jnp.float32)


def put_pair(ref: Any, first: int, one: Array, two: Array) -> None:
    """`pair_of` undone."""
    _, rows, heads, width = ref.shape
    if ref.dtype == jnp.float32:
        flat = ref.reshape(rows * heads, width)
        flat[pl.ds(first, rows, stride=heads)] = one
        flat[pl.ds(first + 1, rows, stride=heads)] = two
        return
    low, high = (
        pltpu.bitcast(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.uint32) for x in (one, two)
    )
    words = ref.bitcast(jnp.uint32).reshape(rows * heads // 2, width)
    words[pl.ds(first // 2, rows, stride=heads // 2)] = (low >> 16) | high


def sums_of(form: Form, g: Float[Array, "C H K"]) -> list[Float[Array, "C H K"]]:
    """All sums of log-decays, numbered as in `Form.sums`.

    By doubling: sums within ranges of 1, 2, 4, .. rows make those of twice as many. Rows are whole
    registers here, so a sum costs an addition a row for eight heads.
    """
    to_row, after, within = g, jnp.zeros_like(g), jnp.zeros_like(g)
    meeting = {}
    for half in (1, 2, 4, 8, 16, 32):
        (left, right), (left_after, right_after) = _parted(to_row, half), _parted(after, half)
        meeting[half] = _joined(left_after, right)
        to_row = _joined(left, right + _last(left))
        after = _joined(left_after + _last(right), right_after)
        if half < BLOCK:
            start, _ = _parted(within, half)
            within = _joined(start, right + _last(start))
    blocks = [within] if form.bounded else []
    return [to_row, after, *(meeting[half] for half in form.halves), *blocks]


def gradient_of_sums(form: Form, slopes: list[Array]) -> Array:
    """The cotangent of g from those of all its sums."""
    g = jax.ShapeDtypeStruct(slopes[0].shape, slopes[0].dtype)
    (made,) = jax.linear_transpose(partial(sums_of, form), g)(slopes)
    return made


def _parted(x: Array, half: int) -> tuple[Array, Array]:
    """Left and right halves of every 2 * half rows, [pairs, half, heads, K] each."""
    left, right = lax.split(x.reshape(-1, 2 * half, *x.shape[1:]), (half, half), 1)
    return left, right


def _joined(left: Array, right: Array) -> Array:
    """`_parted` undone."""
    return jnp.concatenate([left, right], 1).reshape(CHUNK, *left.shape[2:])


def _last(x: Array) -> Array:
    return lax.split(x, (x.shape[1] - 1, 1), 1)[1] if x.shape[1] > 1 else x


def position(columns: int = CHUNK) -> tuple[Array, Array]:
    """Row and column of each element of [64, columns], columns counted in their matrix of 64."""
    row = lax.broadcasted_iota(jnp.int32, (CHUNK, columns), 0)
    return row, lax.broadcasted_iota(jnp.int32, (CHUNK, columns), 1) % CHUNK


def meets(half: int, row: Array, column: Array) -> Array:
    """Whether a row of a right half meets a column of its left half of `half` rows."""
    return ((row ^ column) // half == 1) & (row > column)


class Head(NamedTuple):
    """One head's tokens of a chunk, float32; q is scaled."""

    q: Float[Array, "C K"]
    k: Float[Array, "C K"]
    v: Float[Array, "C V"]
    beta: Float[Array, "C 1"]
    log: tuple[Array, ...]
    """The sums of log-decays [64, K], as `sums_of` numbers them."""

    @property
    def entered(self) -> Array:
        """The decay from the chunk's start to a row."""
        return jnp.exp(self.log[0])

    @property
    def rest(self) -> Array:
        """The decay from a row to the chunk's end."""
        return jnp.exp(self.log[1])

    @property
    def total(self) -> Array:
        """The chunk's decay [1, K]."""
        return jnp.exp(self.log[0][CHUNK - 1 :])


def heads_of(form: Form, refs: tuple[Any, ...], sums: Any, first: int) -> tuple[Head, Head]:
    """Heads `first` and `first + 1` of blocks q, k, v and beta; `sums` holds `sums_of`."""
    *tokens, betas = refs
    pairs = [pair_of(ref, first) for ref in tokens]
    logs = [pair_of(sums.at[pl.ds(i, 1)], first) for i in range(form.sums)]
    scale = pairs[0][0].shape[1] ** -0.5
    one, two = (
        Head(
            pairs[0][i] * scale,
            pairs[1][i],
            pairs[2][i],
            betas[0, 0, :, first + i : first + i + 1],
            tuple(log[i] for log in logs),
        )
        for i in (0, 1)
    )
    return one, two


class Level(NamedTuple):
    """Decays by which rows and keys reach a border between them, and which pairs then meet."""

    left: Float[Array, "C K"]
    right: Float[Array, "C K"]
    kept: Bool[Array, "C C"]


def levels(form: Form, log: tuple[Array, ...]) -> list[Level]:
    """Every pair of a row and an earlier key meets on one of these levels."""
    row, column = position()
    made = []
    for half, sums in zip(form.halves, log[2:], strict=False):
        age = jnp.exp(sums)
        made.append(Level(age, age, meets(half, row, column)))
    if form.bounded:
        kept = (row // BLOCK == column // BLOCK) & (row > column)
        back = jnp.exp(-log[-1]) * 2.0**-CENTRE
        made.append(Level(jnp.exp(log[-1]) * 2.0**CENTRE, back, kept))
    return made


def scores(product: Product, at: list[Level], rows: Array, keys: Array) -> Float[Array, "C C"]:
    """sum_d rows_i keys_j exp(log-decays over (j, i]), strictly lower."""
    made = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    for level in at:
        made = jnp.where(level.kept, product(rows * level.left, keys * level.right, 1, 1), made)
    return made


def row_sums(x: Array) -> Float[Array, "C 1"]:
    """Over the columns."""
    return jnp.sum(x, 1, keepdims=True)


def causal_scores(product: Product, head: Head, at: list[Level]) -> Float[Array, "C C"]:
    """What each row reads of earlier updates and of its own."""
    earlier = scores(product, at, head.q, head.k)
    return with_diagonal(earlier, row_sums(head.q * head.k))


def with_diagonal(matrix: Array, diagonal: Array) -> Array:
    """[64, 64] with [64, 1] on its diagonal."""
    row, column = position()
    return jnp.where(row == column, diagonal, matrix)


def _apart(pair: Array) -> Array:
    """[64, 2 x 64] -> [128, 128] with the two on its diagonal."""
    column = lax.broadcasted_iota(jnp.int32, (CHUNK, PAIR), 1)
    left = column < CHUNK
    return jnp.concatenate([jnp.where(left, pair, 0.0), jnp.where(left, 0.0, pair)], 0)


def inverse(form: Form, lower: Array) -> Array:
    """(I + lower)^-1 for a pair of strictly lower matrices, [64, 2 x 64].

    Blocks of 1, 2, .. rows are doubled: X -= X lower_b X. Never powers of `lower`, which explode on
    correlated keys.
    """
    row, column = position(PAIR)
    x = jnp.where(row == column, 1.0, 0.0) - jnp.where(meets(1, row, column), lower, 0.0)
    for half in (2, 4, 8, 16, 32):
        below = jnp.where(meets(half, row, column), lower, 0.0)
        x = x - form.exact(x, _apart(form.exact(below, _apart(x), 1, 0)), 1, 0)
    return x


def split_pair(pair: Float[Array, "C 2*C"]) -> tuple[Array, Array]:
    """The two matrices of a pair."""
    return pair[:, :CHUNK], pair[:, CHUNK:]


class Taken(NamedTuple):
    """What one head's chunk makes of the state [V, K] that enters it."""

    wanted: Float[Array, "C V"]
    """v less what the state already holds for k."""
    update: Float[Array, "C V"]
    state: Float[Array, "V K"]
    """The state that leaves."""


def take(form: Form, head: Head, inverted: Array, state: Array) -> Taken:
    """The state through a chunk."""
    wanted = head.v - form.exact(head.k * head.entered, state, 1, 1)
    update = form.exact(inverted, head.beta * wanted, 1, 0)
    written = form.exact(update, head.k * head.rest, 0, 0)
    return Taken(wanted, update, state * head.total + written)


def invert_heads(form: Form, heads: tuple[Head, Head], at: list[list[Level]]) -> Array:
    """(I + L)^-1 of two heads side by side, L = beta times the keys' scores."""
    lower = [
        scores(form.exact, level, head.k, head.k) * head.beta
        for head, level in zip(heads, at, strict=True)
    ]
    return inverse(form, jnp.concatenate(lower, 1))


def heads_together(heads: int) -> int:
    """Heads of one program: eight fill a register's rows; 2 or 4 where there are no more."""
    return next((n for n in (2, 4) if heads <= n), 8)


def by_block(x: Float[Array, "R L H"], together: int) -> Float[Array, "R blocks L heads"]:
    """One number a token and head, by blocks of heads."""
    return x.reshape(*x.shape[:2], -1, together).swapaxes(1, 2)
