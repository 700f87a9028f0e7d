"""Checks Kimi delta attention's Triton kernels on a GPU against a float64 recurrence; times them.

    PYTHONPATH=. .venv/bin/python -m tests.device.kda [SEED]        (after `make setup-gpu`)

Prints Markdown tables. Exit status 1 where a check or a run fails, 2 without a GPU. Stops starting
measurements after 3 minutes.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import CHUNK
from rl_jax.kernels.kda import reference, triton_launch
from rl_jax.kernels.pages import NULL_PAGE
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

BUDGET = 180.0
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dstate")
WIDTH = 128
PAGE_LINES, HEAD_LINES = 288, 144
"""Two heads a page, as `sampler/layout.py` lays them out for K = V = 128."""
CORRELATED = {"gate": "open", "beta": 2.0, "correlated": True}
CHECKS = (
    ("T 1000 mixed", 1000, (), {}),
    ("T 1000 mixed", 1000, (), {"dtype": "float32"}),
    ("saturated, beta 1", 200, (), {"gate": "saturated", "beta": 1.0}),
    ("T 500 open", 500, (), {"gate": "open", "dtype": "float32"}),
    ("T 1000 open, beta 2", 1000, (), {"gate": "open", "beta": 2.0}),
    ("packed, exported", 700, (2, 3, 7), {"export": True}),
    ("packed, exported", 700, (2, 3, 7), {"export": True, "dtype": "float32"}),
    ("beta 0", 65, (), {"beta": 0.0}),
    ("T 17, beta 2", 17, (), {"beta": 2.0, "dtype": "float32"}),
    ("T 1000 correlated", 1000, (), {**CORRELATED, "limits": (3e-2, 3e-2)}),
    ("T 1000 correlated", 1000, (), {**CORRELATED, "limits": (5e-3, 5e-3), "dtype": "float32"}),
)
"""Name, tokens, chunks with a reset, and what `check` and `make_inputs` take."""
LAST_CHECKS = (
    ("T 1000 unbounded", 1000, (), {"gate": "unbounded"}),
    ("K 32, V 48", 300, (), {"widths": (32, 48)}),
)
"""The same, of kernels that nothing else needs: compiling them takes as long as all others."""


def make_inputs(
    seed, rows, length, heads, gate="mixed", beta=None, dtype="bfloat16", correlated=False,
    widths=(WIDTH, WIDTH),
):  # fmt: skip
    """Operands of `triton_launch.chunked` without resets, made on the default device.

    One by one: what making them takes leaves no holes that split the memory of a long sequence.
    """
    keys = jax.random.split(jax.random.key(seed), 6)
    tokens, (K, V) = (rows, length, heads), widths

    @partial(jax.jit, donate_argnums=0)
    def unit(x):
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))).astype(dtype)

    def decays(key):
        x = jax.random.normal(key, (*tokens, K))
        if gate == "unbounded":
            return -16.0 * jax.nn.softplus(x)
        shift, scale = {"saturated": (20.0, 0.0), "open": (-12.0, 1.0), "mixed": (0, 4)}[gate]
        return -5.0 * jax.nn.sigmoid(shift + scale * x)

    q, k = (jax.random.normal(key, (*tokens, K), dtype) for key in keys[:2])
    q, k = unit(q), unit(1 + 0.33 * k if correlated else k)
    v = jax.random.normal(keys[2], (*tokens, V), dtype)
    betas = jax.random.uniform(keys[4], tokens, maxval=2.0)
    betas = betas if beta is None else jnp.full(tokens, beta)
    return q, k, v, jax.jit(decays)(keys[3]), betas, jax.random.normal(keys[5], (rows, heads, K, V))


# --- checks


def oracle(reset):
    """(inputs of one row, cotangents) -> values (out, final, states after chunks) and gradients."""

    def run(q, k, v, g, beta, state):
        def chunk(state, tokens):
            fresh, *tokens = tokens
            out, state = reference.recurrent(*tokens, jnp.where(fresh, 0.0, state))
            return state, (out, state)

        chunks = [x.reshape(-1, CHUNK, *x.shape[1:]) for x in (q, k, v, g, beta)]
        final, (out, states) = jax.lax.scan(chunk, state, (jnp.asarray(reset), *chunks))
        return out.reshape(v.shape), final, states

    def both(inputs, cotangents):
        values, pull = jax.vjp(run, *inputs)
        return values, pull(cotangents)

    return both


def check(name, seed, tokens, resets, export=False, limits=None, **kind):
    """One row of the table of checks, and whether it passed."""
    length = -(-tokens // CHUNK) * CHUNK
    q, k, v, g, beta, state = make_inputs(seed, 1, length, 2, **kind)
    real = (jnp.arange(length) < tokens)[None, :, None]
    k, v, g = (jnp.where(real[..., None], x, 0) for x in (k, v, g))
    inputs = q, k, v, g, jnp.where(real, beta, 0), state
    reset = np.zeros(length // CHUNK, bool)
    reset[list(resets)] = True
    run = partial(triton_launch.chunked, bounded=kind.get("gate") != "unbounded", export=export)

    @jax.jit
    def both(inputs, cotangents):
        values, pull = jax.vjp(lambda *x: run(*x, jnp.asarray(reset)[None]), *inputs)
        return values, pull(cotangents)

    keys = jax.random.split(jax.random.key(seed + 1), 3)
    do = jnp.where(real[..., None], jax.random.normal(keys[0], v.shape, v.dtype), 0)
    dstate = jax.random.normal(keys[1], state.shape)
    dafter = jax.random.normal(keys[2], (len(reset), *state.shape)) * export
    values, gradients = both(inputs, (do, dstate, dafter if export else None))
    given = [x[0] for x in inputs], (do[0], dstate[0], dafter[:, 0])
    wants, want_gradients = exactly(oracle(reset), *given)
    forward = [error(a[0], b) for a, b in zip(values[:2], wants[:2], strict=True)]
    forward += [error(values[2][:, 0], wants[2])] if export else []
    backward = [error(a[0], b) for a, b in zip(gradients, want_gradients, strict=True)]
    limits = limits or LIMITS[str(v.dtype)]
    bounds = [limits[0]] * len(forward) + [limits[1]] * len(backward)
    verdict, good = judged([*forward, *backward], bounds)
    cells = [f"{e:.1e}" for e in forward] + [""] * (not export) + [f"{e:.1e}" for e in backward]
    line(name, v.dtype, *cells, verdict)
    return good


def exactly(function, inputs, cotangents):
    """`function` in float64."""
    count = len(inputs)
    return on_cpu(lambda *x: function(x[:count], x[count:]), *inputs, *cotangents)


def check_bits(name, seed):
    """Token 70's inputs leave outputs before it bit-identical; a 64-aligned split leaves all."""
    q, k, v, g, beta, state = make_inputs(seed, 1, 256, 2)
    run = jax.jit(partial(triton_launch.chunked, bounded=True, export=False))
    flags = jnp.zeros((1, 4), bool)
    out, final, _ = run(q, k, v, g, beta, state, flags)
    changed = k.at[:, 70].multiply(-1), v.at[:, 70].add(1), g.at[:, 70].add(-1)
    other, _, _ = run(q, *changed, beta, state, flags)
    causal = bool(jnp.all(out[:, :70] == other[:, :70]) & jnp.any(out != other))
    halves, between = [], state
    for part in (slice(0, 128), slice(128, 256)):
        operands = (x[:, part] for x in (q, k, v, g, beta))
        half, between, _ = run(*operands, between, flags[:, :2])
        halves.append(half)
    same = bool(jnp.all(jnp.concatenate(halves, 1) == out) & jnp.all(between == final))
    verdict, good = judged([], [], causal, same)
    line(name, f"causal {causal}, split at 128 {same}", verdict)
    return good


def decode_operands(seed, sequences, heads, tokens=1):
    """A few tokens of each sequence, and a pool whose pages hold its states in random places."""
    q, k, v, g, beta, state = make_inputs(seed, sequences, tokens, heads)
    count = sequences * heads // 2
    pages = 1 + jax.random.permutation(jax.random.key(seed), count).astype(jnp.int32)
    bits = jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(count, 2, WIDTH, WIDTH)
    pool = jnp.full((1 + count, 2, HEAD_LINES, WIDTH), 7, jnp.uint32)
    pool = pool.at[pages, :, :WIDTH].set(bits).reshape(1 + count, PAGE_LINES, WIDTH)
    n_valid, fresh = jnp.full(sequences, tokens, jnp.int32), jnp.zeros(sequences, bool)
    pages = pages.reshape(sequences, heads // 2)
    return (q, k, v, g, beta, pool, pages, n_valid, fresh), state


def check_decode(name, seed):
    """Up to two tokens on pages in place: outputs, states, and every other word of the pool.

    The second of four rows is idle, the third has one token, the last is fresh.
    """
    operands, state = decode_operands(seed, 4, 4, tokens=2)
    q, k, v, g, beta, pool, pages, n_valid, fresh = operands
    valid = {0: 2, 2: 1, 3: 2}
    n_valid, fresh = jnp.asarray([valid.get(row, 0) for row in range(4)]), fresh.at[3].set(True)
    state = state.at[3].set(0)
    before, used = np.array(pool), np.asarray(pages)
    run = jax.jit(partial(triton_launch.decode, head_lines=HEAD_LINES))
    out, after = run(q, k, v, g, beta, pool, pages, n_valid, fresh)
    after = np.array(after).reshape(-1, 2, HEAD_LINES, WIDTH)
    got = after[used][:, :, :, :WIDTH].copy().view(np.float32).reshape(state.shape)
    before = before.reshape(after.shape)
    outputs, states = [], []
    for row, n in valid.items():
        tokens = [x[row, :n] for x in (q, k, v, g, beta)]
        want, final = on_cpu(reference.recurrent, *tokens, state[row])
        outputs.append(error(out[row, :n], want))
        states.append(error(got[row], final))
        for x in (before, after):
            x[used[row], :, :WIDTH] = 0
            x[NULL_PAGE] = 0
    untouched = bool((before == after).all())
    verdict, good = judged([*outputs, *states], [5e-3] * 3 + [1e-5] * 3, untouched)
    said = f"output {max(outputs):.1e}, state {max(states):.1e}, rest untouched {untouched}"
    line(name, said, verdict)
    return good


def check_all(listed, seed):
    head("case", "operands", "o", "final", "borders", *GRADIENTS, "")
    good = [attempt(check, name, seed, *what, **kind) for name, *what, kind in listed]
    return all(good)


def checks(seed):
    good = [check_all(CHECKS, seed)]
    head("case", "", "")
    good.append(attempt(check_bits, "to the bit", seed))
    good.append(attempt(check_decode, "decode, 2 tokens", seed))
    return all(good)


# --- timings


def time_chunked(name, seed, heads, length, backward, repeats):
    """Bytes per token and head: at the very least, and what the kernels move (README.md)."""
    inputs = make_inputs(seed, 1, length, heads)
    reset = jnp.zeros((1, length // CHUNK), bool)
    run = partial(triton_launch.chunked, bounded=True, export=False)

    def forward(*inputs):
        return run(*inputs, reset)[:2]

    def pull(do, *inputs):
        """The forward kernels' results are not used, so only the backward ones run."""
        return jax.vjp(forward, *inputs)[1]((do, jnp.zeros_like(inputs[-1])))

    tokens = heads * length
    if backward:
        measured = seconds(pull, inputs[2], *inputs, repeats=repeats)
        report(name, measured, tokens * 2824, tokens * 13552, tokens * 475e3)
    else:
        measured = seconds(forward, *inputs, repeats=repeats)
        report(name, measured, tokens * 1540, tokens * 4760, tokens * 170e3)


def time_decode(name, seed, sequences, heads, steps, repeats):
    operands, state = decode_operands(seed, sequences, heads)
    *tokens, pool, pages, n_valid, fresh = operands

    def step(pool, *tokens):
        given = *tokens, pool, pages, n_valid, fresh
        return triton_launch.decode(*given, head_lines=HEAD_LINES)[1]

    measured = seconds_in_place(step, pool, *tokens, steps=steps, repeats=repeats)
    report(name, measured, 2 * state.nbytes, 2 * state.nbytes, 0)


RUNS = (
    ("forward H64 T8192", time_chunked, (64, 8192, False, 20)),
    ("backward H64 T8192", time_chunked, (64, 8192, True, 10)),
    ("decode 64 sequences H32", time_decode, (64, 32, 10, 5)),
    ("backward H8 T1048576", time_chunked, (8, 2**20, True, 2)),
    ("forward H32 T1048576", time_chunked, (32, 2**20, False, 2)),
)
"""Name, and what measures it with which heads, tokens, direction and repeats."""


if __name__ == "__main__":
    why_not = partial(triton_launch.obstacle, WIDTH, WIDTH, jnp.bfloat16)
    sys.exit(
        script(
            "Kimi delta attention", checks, RUNS, BUDGET, why_not, partial(check_all, LAST_CHECKS)
        )
    )
