"""Checks Kimi delta attention's Triton kernels on a GPU against a float64 recurrence; times them.

    .venv/bin/python tests/device/kda.py [SEED]        (after `make setup-gpu`)

Prints a Markdown table of each and exits with 1 where a check fails. Stops starting measurements
after 4 minutes. Floors are for an H200: 4.3 TB/s and 790 TFLOP/s of bfloat16.
"""

import os
import sys
import time
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import CHUNK
from rl_jax.kernels.kda import reference, triton_launch

BANDWIDTH, FLOPS = 4.3e12, 790e12
BUDGET = 240.0
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 8e-3)}
NAMES = ("q", "k", "v", "g", "beta", "state")
WIDTH = 128
TAIL_WORDS = 3 * 3 * WIDTH


def make_inputs(seed, rows, length, heads, gate="mixed", beta=None, dtype=jnp.bfloat16):
    """Operands of `triton_launch.chunked` without resets, made on the default device."""

    @jax.jit
    def make(key):
        keys = jax.random.split(key, 6)
        shape = (rows, length, heads)
        q, k, v = (jax.random.normal(key, (*shape, WIDTH), dtype) for key in keys[:3])
        q, k = (x / jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True) for x in (q, k))
        x = jax.random.normal(keys[3], (*shape, WIDTH))
        if gate == "unbounded":
            g = -16.0 * jax.nn.softplus(x)
        else:
            shift, scale = {"saturated": (20.0, 0.0), "open": (-12.0, 1.0), "mixed": (0, 4)}[gate]
            g = -5.0 * jax.nn.sigmoid(shift + scale * x)
        betas = jnp.full(shape, beta) if beta is not None else jax.random.uniform(keys[4], shape)
        state = jax.random.normal(keys[5], (rows, heads, WIDTH, WIDTH))
        return q.astype(dtype), k.astype(dtype), v, g, betas.astype(jnp.float32), state

    return make(jax.random.key(seed))


# --- checks


def oracle(inputs, reset, cotangents):
    """Outputs, final state and all gradients in float64 on the CPU."""
    exact = [np.asarray(x, np.float64) for x in inputs]
    starts = [*np.flatnonzero(reset), len(reset)]

    def run(q, k, v, g, beta, state):
        outs, begin = [], 0
        for number, end in enumerate(starts):
            if begin == end * CHUNK and number < len(starts) - 1:
                state = jnp.zeros_like(state)
                continue
            part = slice(begin, end * CHUNK)
            out, state = reference.recurrent(q[part], k[part], v[part], g[part], beta[part], state)
            outs.append(out)
            begin = end * CHUNK
            if number < len(starts) - 1:
                state = jnp.zeros_like(state)
        return jnp.concatenate(outs), state

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        args = [x[0] for x in exact]
        values, pull = jax.vjp(run, *(jnp.asarray(x) for x in args))
        gradients = pull(tuple(jnp.asarray(np.asarray(x, np.float64)[0]) for x in cotangents))
        return [np.asarray(x) for x in values], [np.asarray(x) for x in gradients]


def error(got, want):
    """Relative L2; absolute where the oracle has all but decayed away."""
    norm = np.linalg.norm(want)
    difference = np.linalg.norm(np.asarray(got, np.float64) - want)
    return difference / (norm if norm > 1e-30 else 1.0)


def check(name, seed, tokens, resets, **kind):
    """One row of the table of checks, and whether it passed."""
    length = -(-tokens // CHUNK) * CHUNK
    inputs = make_inputs(seed, 1, length, 2, **kind)
    real = jnp.arange(length) < tokens
    q, k, v, g, beta, state = inputs
    k, v, g = (jnp.where(real[None, :, None, None], x, 0) for x in (k, v, g))
    beta = jnp.where(real[None, :, None], beta, 0)
    inputs = q, k, v, g, beta, state
    reset = np.zeros(length // CHUNK, bool)
    reset[list(resets)] = True
    run = partial(triton_launch.chunked, bounded=kind.get("gate") != "unbounded", export=False)

    @jax.jit
    def both(inputs, do, dstate):
        (out, final), pull = jax.vjp(lambda *x: run(*x, jnp.asarray(reset)[None])[:2], *inputs)
        return (out, final), pull((do, dstate))

    keys = jax.random.split(jax.random.key(seed + 1))
    do = jnp.where(real[None, :, None, None], jax.random.normal(keys[0], v.shape, v.dtype), 0)
    dstate = jax.random.normal(keys[1], state.shape)
    values, gradients = both(inputs, do, dstate)
    wants, want_gradients = oracle(inputs, reset, (do, dstate))
    forward = [error(a[0], b) for a, b in zip(values, wants, strict=True)]
    backward = [error(a[0], b) for a, b in zip(gradients, want_gradients, strict=True)]
    limits = LIMITS[str(v.dtype)]
    good = max(forward) <= limits[0] and max(backward) <= limits[1]
    cells = " | ".join(f"{e:.1e}" for e in [*forward, *backward])
    print(f"| {name} | {v.dtype} | {cells} | {'ok' if good else 'FAIL'} |", flush=True)
    return good


def check_causality(seed):
    """Token 70's inputs leave outputs before it bit-identical; a 64-aligned split leaves all."""
    q, k, v, g, beta, state = make_inputs(seed, 1, 256, 2)
    run = jax.jit(partial(triton_launch.chunked, bounded=True, export=False))
    flags = jnp.zeros((1, 4), bool)
    out, final, _ = run(q, k, v, g, beta, state, flags)
    other, _, _ = run(q, k, v.at[:, 70].add(1), g.at[:, 70].add(-1), beta, state, flags)
    causal = bool(jnp.all(out[:, :70] == other[:, :70]))
    halves, between = [], state
    for part in (slice(0, 128), slice(128, 256)):
        operands = (x[:, part] for x in (q, k, v, g, beta))
        half, between, _ = run(*operands, between, flags[:, :2])
        halves.append(half)
    same = bool(jnp.all(jnp.concatenate(halves, 1) == out) & jnp.all(between == final))
    print(f"\nCausal to the bit: {causal}. A split at 128 equal to the bit: {same}.", flush=True)
    return causal and same


def decode_operands(seed, sequences, heads):
    q, k, v, g, beta, state = make_inputs(seed, sequences, 1, heads)
    words = state[0, 0].size + TAIL_WORDS
    page_words = 64 * 576 // 2
    pages = 1 + jax.random.permutation(jax.random.key(seed), sequences * heads)
    pool = jnp.zeros((1 + sequences * heads, page_words), jnp.uint32)
    bits = jax.lax.bitcast_convert_type(state, jnp.uint32).reshape(-1, state[0, 0].size)
    pool = pool.at[pages, : bits.shape[1]].set(bits).at[:, words - 1].set(7)
    n_valid = jnp.ones(sequences, jnp.int32)
    return (q, k, v, g, beta, pages.reshape(sequences, heads), n_valid, pool), state, words


def check_decode(seed):
    """One token on pages in place: outputs, states, and every other word of the pool."""
    operands, state, words = decode_operands(seed, 3, 4)
    q, k, v, g, beta, pages, n_valid, pool = operands
    n_valid = n_valid.at[1].set(0)
    run = jax.jit(partial(triton_launch.decode, head_words=words))
    out, after = run(*operands[:6], n_valid, pool)
    got = np.asarray(after)[np.asarray(pages)][..., : WIDTH * WIDTH].view(np.float32)
    rest = np.asarray(after).copy()
    rest[np.asarray(pages)[[0, 2]], : WIDTH * WIDTH] = 0
    kept = np.asarray(pool).copy()
    kept[np.asarray(pages)[[0, 2]], : WIDTH * WIDTH] = 0
    errors = []
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        for row in (0, 2):
            args = [np.asarray(x, np.float64)[row] for x in (q, k, v, g, beta, state)]
            want, final = reference.recurrent(*(jnp.asarray(x) for x in args))
            errors += [error(out[row], np.asarray(want))]
            errors += [error(got[row].reshape(final.shape), np.asarray(final))]
    good = max(errors[::2]) <= 5e-3 and max(errors[1::2]) <= 1e-5 and bool((rest == kept).all())
    untouched = bool((rest == kept).all())
    verdict = "ok" if good else "FAIL"
    print(f"Decode: output {max(errors[::2]):.1e}, state {max(errors[1::2]):.1e}, ", end="")
    print(f"rest of the pool untouched {untouched}: {verdict}", flush=True)
    return good


# --- timings


def seconds(function, *operands, repeats):
    """Mean of `repeats` runs in a row, compiled and warm; and bytes the program needs."""
    compiled = jax.jit(function).lower(*operands).compile()
    memory = compiled.memory_analysis()
    needed = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    jax.block_until_ready(compiled(*operands))
    begin = time.perf_counter()
    for _ in range(repeats):
        result = compiled(*operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / repeats, needed


def report(name, measured, floor_bytes, own_bytes, flops):
    took, needed = measured
    floor = max(floor_bytes / BANDWIDTH, flops / FLOPS)
    floors = (1e3 * x for x in (took, floor, own_bytes / BANDWIDTH, flops / FLOPS))
    cells = " | ".join(f"{x:.3f}" for x in floors)
    print(f"| {name} | {cells} | {floor / took:.0%} | {needed / 2**30:.1f} |", flush=True)


def time_chunked(name, seed, heads, length, backward, repeats):
    """Traffic per token and head: 5 x 256 B + gate 512 B at least; what the kernels move beside."""
    inputs = make_inputs(seed, 1, length, heads)
    reset = jnp.zeros((1, length // CHUNK), bool)
    run = partial(triton_launch.chunked, bounded=True, export=False)
    forward = lambda *x: run(*x, reset)[:2]  # noqa: E731
    tokens = heads * length
    if not backward:
        measured = seconds(forward, *inputs, repeats=repeats)
        report(name, measured, tokens * 1540, tokens * (1028 + 1032 + 1288 + 260), tokens * 170e3)
        return

    def pull(do, *inputs):
        return jax.vjp(forward, *inputs)[1]((do, jnp.zeros_like(inputs[-1])))

    measured = seconds(pull, inputs[2], *inputs, repeats=repeats)
    own = (1028 + 1160) + (1028 + 768) + (1412 + 768) + (768 + 512) + (1808 + 1024 + 2 * 512)
    report(name, measured, tokens * 3080, tokens * own, tokens * 475e3)


def time_decode(name, seed, sequences, heads, repeats):
    operands, state, words = decode_operands(seed, sequences, heads)
    pool = operands[-1]
    step = jax.jit(partial(triton_launch.decode, head_words=words), donate_argnums=7)
    compiled = step.lower(*operands).compile()
    memory = compiled.memory_analysis()
    _, pool = compiled(*operands)
    jax.block_until_ready(pool)
    begin = time.perf_counter()
    for _ in range(repeats):
        _, pool = compiled(*operands[:-1], pool)
    jax.block_until_ready(pool)
    took = (time.perf_counter() - begin) / repeats
    moved = 2 * state.nbytes
    report(name, (took, memory.temp_size_in_bytes + pool.nbytes), moved, moved, 0)


def main(seed: int) -> int:
    begin = time.perf_counter()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, seed {seed}\n")
    print(f"| case | operands | o | final | {' | '.join('d' + n for n in NAMES)} | |")
    print("|---" * (len(NAMES) + 5) + "|")
    f32 = jnp.float32
    good = [
        check("T 1000 mixed", seed, 1000, ()),
        check("T 1000 mixed", seed, 1000, (), dtype=f32),
        check("saturated, beta 1", seed, 200, (), gate="saturated", beta=1.0),
        check("open", seed, 500, (), gate="open", dtype=f32),
        check("open, beta 1", seed, 500, (), gate="open", beta=1.0),
        check("unbounded", seed, 200, (), gate="unbounded"),
        check("packed, resets", seed, 700, (2, 3, 7)),
        check("beta 0", seed, 65, (), beta=0.0),
        check("beta 2", seed, 65, (), beta=2.0, dtype=f32),
        check_causality(seed),
        check_decode(seed),
    ]
    print("\n| run | ms | floor ms | own traffic ms | tensor ms | of floor | GiB |")
    print("|---" * 7 + "|")
    runs = [
        partial(time_chunked, "forward H64 T8192", seed, 64, 8192, False, 20),
        partial(time_chunked, "backward H64 T8192", seed, 64, 8192, True, 10),
        partial(time_decode, "decode 64 sequences H32", seed, 64, 32, 50),
        partial(time_chunked, "backward H8 T1048576", seed, 8, 2**20, True, 2),
        partial(time_chunked, "forward H32 T1048576", seed, 32, 2**20, False, 2),
    ]
    for run in runs:
        if time.perf_counter() - begin > BUDGET:
            print(f"| {run.args[0]} | not run: out of time | | | | | |")
            continue
        run()
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() % 2**31))
