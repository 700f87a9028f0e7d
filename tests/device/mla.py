"""Checks latent attention's Triton kernels on a GPU against one float64 softmax; times them.

    PYTHONPATH=. .venv/bin/python -m tests.device.mla [SEED]        (after `make setup-gpu`)

Prints Markdown tables. Exit status 1 where a check or a run fails, 2 without a GPU. Stops starting
measurements after 2 minutes.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.kernels.mla import pages, triton_launch
from tests.device.measure import (
    LIMITS,
    attempt,
    error,
    head,
    judged,
    line,
    on_cpu,
    report,
    script,
    seconds,
    seconds_in_place,
)

BUDGET = 120.0
A, V = 192, 128
WIDTH, VALUE = 576, 512
LINES = 64 * WIDTH // 128


def make_rows(seed, rows, length, heads, dtype=jnp.bfloat16, sizes=(A, V)):
    """q, k, v and a cotangent of the outputs, made on the default device."""

    @jax.jit
    def make(key):
        widths = sizes[0], sizes[0], sizes[1], sizes[1]
        keys = jax.random.split(key, 4)
        shape = rows, length, heads
        made = zip(keys, widths, strict=True)
        return [jax.random.normal(key, (*shape, width), dtype) for key, width in made]

    return make(jax.random.key(seed))


def make_pages(seed, positions, tokens, heads, table, dtype=jnp.bfloat16, sizes=(WIDTH, LINES)):
    """q, pool, pages, positions and n_valid; what a request has not written is NaN."""
    width, lines = sizes
    rows = len(positions)
    q = jax.random.normal(jax.random.key(seed), (rows, tokens, heads, width), dtype)
    order = 1 + jax.random.permutation(jax.random.key(seed + 1), rows * table)
    order = order.reshape(rows, table).astype(jnp.int32)
    starts, valid = jnp.asarray(positions, jnp.int32), jnp.full(rows, tokens, jnp.int32)

    @jax.jit
    def fill(key):
        values = jax.random.normal(key, (1 + rows * table, 64 * width))
        token = jnp.arange(table * 64).reshape(table, 64, 1)
        written = token < (starts + tokens)[:, None, None, None]
        written = jnp.broadcast_to(written, (rows, table, 64, width))
        mask = jnp.zeros(values.shape, bool).at[order].set(written.reshape(rows, table, -1))
        values = jnp.where(mask, values, jnp.nan)
        rest = jnp.full((len(values), lines * 128 - 64 * width), jnp.nan)
        words = jnp.concatenate([values, rest], 1).reshape(-1, lines, 128)
        return jax.lax.bitcast_convert_type(words, jnp.uint32)

    return q, fill(jax.random.key(seed + 2)), order, starts, valid


# --- checks


def oracle(lengths, scale):
    """(q, k, v, do) of one row -> out and gradients, a segment after the other, each 64-aligned."""

    def attend(q, k, v):
        scores = jnp.einsum("lha,mha->hlm", q, k) * scale
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        return jnp.einsum("hlm,mhv->lhv", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)

    def run(q, k, v):
        out, start = jnp.zeros((*q.shape[:2], v.shape[-1]), q.dtype), 0
        for n in lengths:
            own = slice(start, start + n)
            out = out.at[own].set(attend(q[own], k[own], v[own]))
            start += -(-n // 64) * 64
        return out

    def both(q, k, v, do):
        out, pull = jax.vjp(run, q, k, v)
        return out, pull(do)

    return both


def segments_of(lengths):
    made = []
    for number, n in enumerate(lengths):
        made += [number] * n + [-1] * (-n % 64)
    return jnp.asarray(made, jnp.int32)[None]


def check_heads(name, seed, lengths, dtype, sizes=(A, V)):
    """One row of the table of checks, and whether it passed."""
    segments, scale = segments_of(lengths), sizes[0] ** -0.5
    q, k, v, do = make_rows(seed, 1, segments.shape[1], 2, dtype, sizes)

    @jax.jit
    def both(q, k, v, do):
        run = partial(triton_launch.attend_heads, segments=segments, scale=scale)
        out, pull = jax.vjp(lambda *x: run(*x), q, k, v)
        return out, pull(do)

    out, gradients = both(q, k, v, do)
    want, wants = on_cpu(oracle(lengths, scale), *(x[0] for x in (q, k, v, do)))
    errors = [error(out[0], want)]
    errors += [error(a[0], b) for a, b in zip(gradients, wants, strict=True)]
    limits = LIMITS[str(q.dtype)]
    limits = limits[:1] + limits[1:] * 3
    empty = np.asarray(segments[0]) < 0
    zeros = all(not np.any(np.asarray(x[0])[empty]) for x in (out, *gradients))
    verdict, good = judged(errors, limits, zeros)
    line(name, q.dtype, *(f"{e:.1e}" for e in errors), verdict)
    return good


def attention_of(q, latents, *, value_width, scale):
    """The last n queries [n, H, W] of a sequence over its latents [L, W]."""
    n, length = len(q), len(latents)
    scores = jnp.einsum("nhw,cw->nhc", q, latents) * scale
    seen = jnp.arange(length) <= (length - n + jnp.arange(n))[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("nhc,cv->nhv", weights, latents[:, :value_width])


def check_pages(name, seed, positions, tokens, heads, dtype, sizes=(WIDTH, LINES, VALUE)):
    """The same of pages; also a row alone under a wider table, bit for bit."""
    table = -(-(max(positions) + tokens) // 64) + 1
    operands = make_pages(seed, positions, tokens, heads, table, dtype, sizes[:2])
    scale, value_width = sizes[0] ** -0.5, sizes[2]
    run = jax.jit(partial(triton_launch.attend_pages, value_width=value_width, scale=scale))
    out = run(*operands)
    q, pool, pages, starts, valid = operands
    wide = jnp.pad(pages[:1], ((0, 0), (0, 40)))
    alone = run(q[:1], pool, wide, starts[:1], valid[:1])
    same = bool(jnp.all(alone[0] == out[0]))
    attend = partial(attention_of, value_width=value_width, scale=scale)
    errors = []
    for r, position in enumerate(positions):
        words = np.asarray(pool)[np.asarray(pages[r])].reshape(table, -1)[:, : 64 * sizes[0]]
        latents = words.copy().view(np.float32).reshape(-1, sizes[0])[: position + tokens]
        latents = np.asarray(jnp.asarray(latents).astype(dtype).astype(jnp.float32))
        errors.append(error(out[r], on_cpu(attend, q[r], latents)))
    verdict, good = judged(errors, [LIMITS[str(q.dtype)][0]] * len(errors), same)
    line(name, q.dtype, f"{max(errors):.1e}", f"alone equal {same}", verdict)
    return good


def check_bits(name, seed):
    """A segment alone or packed; changed tokens and queries before; two runs, gradients too."""
    segments = segments_of((70, 300, 64))
    q, k, v, do = make_rows(seed, 1, segments.shape[1], 2)
    run = jax.jit(partial(triton_launch.attend_heads, scale=0.1))
    out, own = run(q, k, v, segments), slice(128, 448)
    packed = bool(jnp.all(run(*(x[:, own] for x in (q, k, v, segments))) == out[:, own]))
    other = run(q, k.at[:, 300].add(1), v.at[:, 300].add(1), segments)
    causal = bool(jnp.all(other[:, :300] == out[:, :300]))

    @jax.jit
    def gradients(q, k, v, do):
        return jax.vjp(lambda *x: run(*x, segments), q, k, v)[1](do)

    pairs = zip(gradients(q, k, v, do), gradients(q, k, v, do), strict=True)
    again = all(bool(jnp.all(a == b)) for a, b in pairs)
    verdict, good = judged([], [], packed, causal, again)
    said = f"packed {packed}, causal {causal}, gradients of two runs {again}"
    line(name, said, verdict)
    return good


# --- timings


def time_heads(name, seed, length, backward, repeats, heads=32):
    """Causal: half of L^2 scores; forward 2 products, backward 5 at the least (the kernels' 7)."""
    q, k, v, do = make_rows(seed, 1, length, heads)
    segments = jnp.zeros((1, length), jnp.int32)
    run = partial(triton_launch.attend_heads, segments=segments, scale=A**-0.5)
    tokens, pairs = 2 * heads * length, heads * length * length
    forward = seconds(lambda *x: run(*x), q, k, v, repeats=repeats)
    if not backward:
        moved = tokens * (2 * A + 2 * V)
        report(name, forward, moved, moved, pairs * (A + V))
        return
    # The forward pass, timed alone, is taken off.
    both = seconds(lambda q, k, v, do: jax.vjp(run, q, k, v)[1](do), q, k, v, do, repeats=repeats)
    moved = tokens * (4 * A + 4 * V)
    report(name, (both[0] - forward[0], both[1]), moved, moved, pairs * (3 * A + 2 * V))


def time_pages(name, seed, sequences, context, heads, repeats, tokens=1):
    """Attention of each sequence's last tokens: every page is read once at the least."""
    operands = make_pages(seed, [context - tokens] * sequences, tokens, heads, context // 64)
    run = partial(triton_launch.attend_pages, value_width=VALUE, scale=0.05)
    keys = sequences * context
    moved, flops = 4 * keys * WIDTH, 2 * keys * tokens * heads * (WIDTH + VALUE)
    report(name, seconds(run, *operands, repeats=repeats), moved, moved, flops)


def time_write(name, seed, sequences, context, steps, repeats):
    """XLA's scatter of a token each; the pool is donated and given back."""
    positions = [context - 1] * sequences
    _, pool, *given = make_pages(seed, positions, 1, 1, context // 64)
    values = jnp.zeros((sequences, 1, WIDTH))
    operands = *given, values
    measured = seconds_in_place(pages.write_pages, pool, *operands, steps=steps, repeats=repeats)
    report(name, measured, 2 * values.nbytes, 2 * values.nbytes, 0)


def checks(seed):
    bf16, f32 = jnp.bfloat16, jnp.float32
    packed = (70, 1, 64, 513, 200)
    head("rows", "operands", "out", "dq", "dk", "dv", "")
    good = [
        attempt(check_heads, "T 1000", seed, (1000,), bf16),
        attempt(check_heads, "packed", seed, packed, bf16),
        attempt(check_heads, "packed, 48 and 32 wide", seed, packed, f32, (48, 32)),
        attempt(check_heads, "T 1000", seed, (1000,), f32),
    ]
    head("pages", "operands", "out", "", "")
    narrow = f32, (48, 24, 32)
    good += [
        attempt(check_pages, "decode", seed, (0, 63, 1500, 4000), 1, 32, bf16),
        attempt(check_pages, "four tokens, 64 heads", seed, (0, 700, 62), 4, 64, bf16),
        attempt(check_pages, "prefill", seed, (0, 64, 640), 128, 8, bf16),
        attempt(check_pages, "decode, 48 and 32 wide", seed, (0, 63, 1500), 1, 4, *narrow),
    ]
    head("rows", "", "")
    return all([*good, attempt(check_bits, "to the bit", seed)])


RUNS = (
    ("decode 64 x 32k, H32", time_pages, (64, 32768, 32, 20)),
    ("write 64 tokens", time_write, (64, 4096, 10, 5)),
    ("forward T8192 H32", time_heads, (8192, False, 10)),
    ("backward T8192 H32", time_heads, (8192, True, 5)),
    ("prefill 2048 at 32k, H32", time_pages, (1, 32768, 32, 3, 2048)),
    ("4 tokens, 64 x 32k, H32", time_pages, (64, 32768, 32, 10, 4)),
    ("forward T65536 H32", time_heads, (65536, False, 2)),
    ("backward T65536 H32", time_heads, (65536, True, 1)),
)
"""Name, and what measures it with which sizes and repeats."""


if __name__ == "__main__":
    why_not = partial(triton_launch.obstacle, WIDTH, VALUE, jnp.bfloat16)
    sys.exit(script("Latent attention", checks, RUNS, BUDGET, why_not))
