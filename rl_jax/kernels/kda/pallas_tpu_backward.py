"""[P] The backward pass of Kimi delta attention on TPUs: groups of chunks, the last first.

A program goes through a group twice. First on from the state that enters it, and what every chunk
took stays on the chip; then back from the cotangent of the state that leaves it. So tokens are read
twice, gradients written once, and nothing else goes through memory.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda.pallas_tpu_chunk import (
    GROUP,
    VMEM_LIMIT,
    Form,
    Head,
    Level,
    Taken,
    by_block,
    causal_scores,
    gradient_of_sums,
    heads_of,
    heads_together,
    invert_heads,
    levels,
    pair_of,
    put_pair,
    row_sums,
    split_pair,
    sums_of,
    take,
)


class Scratch(NamedTuple):
    """What stays on the chip; the last four per chunk of the group."""

    sums: Any
    slopes: Any
    """The cotangents of the sums."""
    carried: Any
    """The state on the way on, its cotangent on the way back, [heads, V, K]."""
    entering: Any
    wanted: Any
    update: Any
    inverse: Any
    """Pairs of heads side by side."""

    @staticmethod
    def shapes(form: Form, heads: int, key_width: int, value_width: int) -> "Scratch":
        sums = pltpu.VMEM((form.sums, CHUNK, heads, key_width), jnp.float32)
        state, value = (heads, value_width, key_width), (GROUP, heads, CHUNK, value_width)
        return Scratch(
            sums,
            sums,
            pltpu.VMEM(state, jnp.float32),
            pltpu.VMEM((GROUP, *state), jnp.float32),
            pltpu.VMEM(value, jnp.float32),
            pltpu.VMEM(value, jnp.float32),
            pltpu.VMEM((GROUP, heads // 2, CHUNK, 2 * CHUNK), jnp.float32),
        )


class Slopes(NamedTuple):
    """The cotangents of one head's tokens and of its sums."""

    q: Array
    k: Array
    v: Array
    beta: Array
    log: list[Array]


def _strictly_lower(x: Array) -> Array:
    row, column = (lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    return jnp.where(row > column, x, 0.0)


def _score_slopes(
    form: Form, head: Head, at: list[Level], d_causal: Array, d_lower: Array
) -> Slopes:
    """What strictly lower cotangents of A and L, [64, 64], make of q, k, beta and the levels' sums.

    L = beta times the keys' scores, whose cotangent d_lower is without beta.
    """
    d_q, d_row, d_column = jnp.zeros((3, *head.q.shape), jnp.float32)
    log = []
    for level in at:
        right = head.k * level.right
        rows = jnp.concatenate([head.q * level.left, head.k * level.left], 0)
        d_a, d_l = (jnp.where(level.kept, x, 0.0) for x in (d_causal, d_lower))
        d_rows = form.exact(jnp.concatenate([d_a, d_l], 0), right, 1, 0)
        d_right = form.exact(jnp.concatenate([d_a, d_l * head.beta], 0), rows, 0, 0)
        by_q, by_k = d_rows[:CHUNK] * level.left, d_rows[CHUNK:] * level.left
        by_column = d_right * level.right
        d_q, d_row, d_column = d_q + by_q, d_row + by_k, d_column + by_column
        on_rows, on_keys = head.q * by_q + head.beta * (head.k * by_k), head.k * by_column
        log.append((on_rows, on_keys))
    halves = [on_rows + on_keys for on_rows, on_keys in log[: len(form.halves)]]
    blocks = [on_rows - on_keys for on_rows, on_keys in log[len(form.halves) :]]
    d_k = d_column + head.beta * d_row
    return Slopes(d_q, d_k, head.v, row_sums(head.k * d_row), halves + blocks)


def _pull(
    form: Form, head: Head, taken: Taken, inverted: Array, d_out: Array, d_state: Array
) -> tuple[Slopes, Array]:
    """The cotangents of a chunk's tokens and of the state that enters it.

    `taken.state` is the entering state, `d_state` the cotangent of the leaving one, both [V, K].
    """
    at = levels(form, head.log)
    q_entered, k_entered, k_left = head.q * head.entered, head.k * head.entered, head.k * head.rest
    causal = causal_scores(form.exact, head, at)
    d_update = form.exact(causal, d_out, 0, 0) + form.exact(k_left, d_state, 1, 1)
    d_written = form.exact(inverted, d_update, 0, 0)
    d_v = head.beta * d_written
    both = form.exact(jnp.concatenate([d_out, d_written], 0), taken.update, 1, 1)
    d_causal, d_lower = _strictly_lower(both[:CHUNK]), -_strictly_lower(both[CHUNK:])
    scored = _score_slopes(form, head, at, d_causal, d_lower)
    d_read = jnp.concatenate([d_out, -d_v], 0)
    d_entered = form.exact(d_read, taken.state, 1, 0)
    d_q, d_k = d_entered[:CHUNK] * head.entered, d_entered[CHUNK:] * head.entered
    d_left = form.exact(taken.update, d_state, 1, 0) * head.rest
    on_total = head.total * jnp.sum(taken.state * d_state, 0, keepdims=True)
    last = lax.broadcasted_iota(jnp.int32, d_q.shape, 0) == CHUNK - 1
    to_row = head.q * d_q + head.k * d_k + jnp.where(last, on_total, 0.0)
    on_diagonal = row_sums(d_out * taken.update)
    slopes = Slopes(
        scored.q + d_q + on_diagonal * head.k,
        scored.k + d_k + d_left + on_diagonal * head.q,
        d_v,
        scored.beta + row_sums(d_written * taken.wanted),
        [to_row, head.k * d_left, *scored.log],
    )
    entered = jnp.concatenate([q_entered, k_entered], 0)
    return slopes, d_state * head.total + form.exact(d_read, entered, 0, 0)


def _go_on(
    form: Form, refs: tuple[Any, ...], clear: Array, at_chunk: Array, scratch: Scratch
) -> None:
    """A chunk of the way on; keeps what the way back needs."""

    @pl.when(clear)
    def _clear():
        scratch.carried[...] = jnp.zeros_like(scratch.carried)

    scratch.entering[at_chunk] = scratch.carried[...]
    for first in range(0, scratch.carried.shape[0], 2):
        pair = heads_of(form, refs, scratch.sums, first)
        inverses = invert_heads(form, pair, [levels(form, head.log) for head in pair])
        scratch.inverse[at_chunk, first // 2] = inverses
        for i, (head, inverted) in enumerate(zip(pair, split_pair(inverses), strict=True), first):
            taken = take(form, head, inverted, scratch.carried[i])
            scratch.wanted[at_chunk, i], scratch.update[at_chunk, i] = taken.wanted, taken.update
            scratch.carried[i] = taken.state


def _come_back(
    form: Form, refs: tuple[Any, ...], d_out: Any, d_refs: tuple[Any, ...], clear: Array,
    at_chunk: Array, scratch: Scratch,
) -> None:  # fmt: skip
    """A chunk of the way back; writes its gradients."""
    d_q, d_k, d_v, d_g, d_beta = d_refs
    heads, _, width = scratch.carried.shape
    for first in range(0, heads, 2):
        pair = heads_of(form, refs, scratch.sums, first)
        inverses = split_pair(scratch.inverse[at_chunk, first // 2])
        d_outs = pair_of(d_out, first)
        made = []
        for i in (0, 1):
            at = at_chunk, first + i
            taken = Taken(scratch.wanted[at], scratch.update[at], scratch.entering[at])
            d_state = scratch.carried[first + i]
            slopes, d_state = _pull(form, pair[i], taken, inverses[i], d_outs[i], d_state)
            scratch.carried[first + i] = d_state
            d_beta[0, 0, :, first + i : first + i + 1] = slopes.beta
            made.append(slopes)
        one, two = made
        put_pair(d_q, first, one.q * width**-0.5, two.q * width**-0.5)
        put_pair(d_k, first, one.k, two.k)
        put_pair(d_v, first, one.v, two.v)
        for i, both in enumerate(zip(one.log, two.log, strict=True)):
            put_pair(scratch.slopes.at[pl.ds(i, 1)], first, *both)
    d_g[0] = gradient_of_sums(form, [scratch.slopes[i] for i in range(form.sums)])

    @pl.when(clear)
    def _clear():
        scratch.carried[...] = jnp.zeros_like(scratch.carried)


def _kernel(
    reset: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, d_out: Any, entering: Any, d_final: Any,
    *refs: Any, form: Form, export: bool, chunks: int,
) -> None:  # fmt: skip
    """One step of a group's way on or back for a block of heads.

    `refs` are the cotangents of exported states, outputs, the cotangent's way from group to group,
    then Scratch.
    """
    d_after, refs = (refs[0], refs[1:]) if export else (None, refs)
    *d_refs, d_state, passed = refs[:7]
    scratch = Scratch(*refs[7:])
    row, step = pl.program_id(0), pl.program_id(3)
    group = pl.num_programs(2) - 1 - pl.program_id(2)
    back = step >= GROUP
    at_chunk = jnp.where(back, 2 * GROUP - 1 - step, step)
    chunk = group * GROUP + at_chunk
    clear = reset[row * chunks + jnp.minimum(chunk, chunks - 1)] != 0
    tokens = q, k, v, beta

    @pl.when((step == 0) & (pl.program_id(2) == 0))
    def _last():
        for head in range(passed.shape[0]):
            passed[head] = d_final[0, head].T

    @pl.when(step == 0)
    def _enter():
        scratch.carried[...] = entering[0, 0]

    @pl.when(step == GROUP)
    def _turn():
        scratch.carried[...] = passed[...]

    @pl.when(chunk < chunks)
    def _sums():
        scratch.sums[...] = jnp.stack(sums_of(form, g[0]))

    @pl.when((chunk < chunks) & ~back)
    def _on():
        _go_on(form, tokens, clear, at_chunk, scratch)

    @pl.when((chunk < chunks) & back)
    def _back():
        if d_after is not None:
            for head in range(passed.shape[0]):
                scratch.carried[head] += d_after[0, 0, head].T
        _come_back(form, tokens, d_out, tuple(d_refs), clear, at_chunk, scratch)

    @pl.when(step == 2 * GROUP - 1)
    def _pass():
        passed[...] = scratch.carried[...]

    @pl.when(chunk == 0)
    def _first():
        for head in range(passed.shape[0]):
            d_state[0, head] = scratch.carried[head].T


def backward(
    form: Form, operands: tuple[Array, ...], reset: Array, entering: Array,
    cotangents: tuple[Array, Array, Array | None],
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of q, k, v, g, beta and of the state before the first chunk.

    `operands` are (q, k, v, g, beta), `entering` the states entering groups, `cotangents` those of
    (out, final, states after chunks or None).
    """
    q, k, v, g, beta = operands
    d_out, d_final, d_after = cotangents
    rows, length, heads, width = q.shape
    chunks, groups = length // CHUNK, entering.shape[0]
    value_width, together = v.shape[-1], heads_together(heads)

    def group_of(i):
        return groups - 1 - i

    def there(i, s):
        """The chunk of a step."""
        on = jnp.where(s < GROUP, s, 2 * GROUP - 1 - s)
        return jnp.minimum(group_of(i) * GROUP + on, chunks - 1)

    def back(i, s):
        """The same on the way back, until then where that begins."""
        return there(i, jnp.maximum(s, GROUP))

    def tokens(width, chunk):
        return pl.BlockSpec(
            (1, CHUNK, together, width), lambda r, h, i, s, _: (r, chunk(i, s), h, 0)
        )

    def betas(chunk):
        return pl.BlockSpec((1, 1, CHUNK, together), lambda r, h, i, s, _: (r, h, chunk(i, s), 0))

    def states(index, *shape):
        return pl.BlockSpec((1, 1, together, *shape), index)

    key, value, d_key, d_value = (tokens(n, c) for c in (there, back) for n in (width, value_width))
    whole = pl.BlockSpec((1, together, width, value_width), lambda r, h, i, s, _: (r, h, 0, 0))
    enters = states(lambda r, h, i, s, _: (group_of(i), r, h, 0, 0), value_width, width)
    after = states(lambda r, h, i, s, _: (back(i, s), r, h, 0, 0), width, value_width)
    inputs = [q, k, v, g, by_block(beta, together), d_out, entering, d_final]
    specs = [key, key, value, key, betas(there), d_value, enters, whole]
    if d_after is not None:
        inputs, specs = [*inputs, d_after], [*specs, after]
    shapes = [(x.shape, x.dtype) for x in (q, k, v, g, inputs[4], d_final)]
    *d_tokens, d_beta, d_state = pl.pallas_call(
        partial(_kernel, form=form, export=d_after is not None, chunks=chunks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, heads // together, groups, 2 * GROUP),
            in_specs=specs,
            out_specs=[d_key, d_key, d_value, d_key, betas(back), whole],
            scratch_shapes=[
                pltpu.VMEM((together, value_width, width), jnp.float32),
                *Scratch.shapes(form, together, width, value_width),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        name="kda_backward",
    )(reset.reshape(-1), *inputs)
    return *d_tokens, d_beta.swapaxes(1, 2).reshape(beta.shape), d_state
