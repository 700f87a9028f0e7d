"""What the scripts of this folder share: errors, times, rows of tables, and how a script ends.

A row that fails, however it does, is told and counted, and the next one starts: a machine with a
GPU is rare. Floors are for an H200: 4.3 TB/s and 790 TFLOP/s of bfloat16.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BANDWIDTH, FLOPS = 4.3e12, 790e12
LIMITS = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 8e-3)}
"""Relative L2 of values and of gradients."""
ROUNDS = 3
COLUMNS = "run", "ms", "floor ms", "own traffic ms", "tensor ms", "of floor", "GiB"


def error(got, want) -> float:
    """Relative L2; absolute where the oracle has all but decayed away."""
    norm = float(np.linalg.norm(want))
    difference = float(np.linalg.norm(np.asarray(got, np.float64) - want))
    return difference / (norm if norm > 1e-30 else 1.0)


def on_cpu(function, *arrays):
    """Results of `function` of the arrays in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return jax.tree.map(np.asarray, jax.jit(function)(*exact))


# --- rows


def line(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*columns: str) -> None:
    print()
    line(*columns)
    line(*["---"] * len(columns))


def judged(errors: Sequence[float], limits: Sequence[float], *others: bool) -> tuple[str, bool]:
    """The last cell of a check and whether it passed; an error that is not a number fails."""
    good = all(e <= limit for e, limit in zip(errors, limits, strict=True)) and all(others)
    return ("ok" if good else "FAIL"), good


def attempt(row: Callable[..., bool | None], name: str, *args: Any, **options: Any) -> bool:
    """Prints a row; false where it says so or could not be made."""
    try:
        return row(name, *args, **options) is not False
    except Exception as failure:  # Whatever the compiler or the device raises is the row.
        said = str(failure).strip().splitlines() or [""]
        line(name, f"FAIL {type(failure).__name__}: {said[0][:300]}")
        return False


# --- times


def bytes_needed(compiled) -> int:
    """Arguments, results and temporaries of a program, what lies in place counted once."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def best(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of `repeats` runs in a row, of the best of a few rounds after one round."""
    found = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        for _ in range(repeats):
            result = run()
        jax.block_until_ready(result)
        del result
        found.append((time.perf_counter() - begin) / repeats)
    return min(found[1:])


def seconds(function, *operands, repeats: int) -> tuple[float, int]:
    """Of one run, and bytes the program needs."""
    compiled = jax.jit(function).lower(*operands).compile()
    return best(partial(compiled, *operands), repeats), bytes_needed(compiled)


def seconds_in_place(step, pool, *operands, steps: int, repeats: int) -> tuple[float, int]:
    """Of one of `steps` steps (pool, *operands) -> pool of one program, and bytes it needs.

    In one program, because starting one from here takes longer than a short step.
    """

    def run(pool, *operands):
        for _ in range(steps):
            pool = step(pool, *operands)
        return pool

    compiled = jax.jit(run, donate_argnums=0).lower(pool, *operands).compile()
    held = [pool]
    del pool

    def once():
        held[0] = compiled(held[0], *operands)
        return held[0]

    return best(once, repeats) / steps, bytes_needed(compiled)


def report(name: str, measured: tuple[float, int], least: float, own: float, flops: float) -> None:
    """A row of `COLUMNS`: bytes to be moved at the very least, and those the kernels move."""
    took, needed = measured
    floor = max(least / BANDWIDTH, flops / FLOPS)
    times = [f"{1e3 * x:.3f}" for x in (took, floor, own / BANDWIDTH, flops / FLOPS)]
    line(name, *times, f"{floor / took:.0%}", f"{needed / 2**30:.1f}")


# --- scripts


def obstacle(why_not: Callable[[], str]) -> str:
    """Why nothing can run here: what a kernel's launch layer says, or jax's own complaint."""
    try:
        return why_not()
    except RuntimeError as failure:
        return str(failure).splitlines()[0]


def script(
    title: str,
    checks: Callable[[int], bool],
    runs: Sequence[tuple],
    budget: float,
    why_not: Callable[[], str],
    last_checks: Callable[[int], bool] = lambda seed: True,
) -> int:
    """Checks, timings (name, function, arguments), other checks; none of what follows the first
    is started after `budget` seconds.

    Exit status 0, 1 where a row fails, 2 where there is no GPU.
    """
    begin = time.perf_counter()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # Read when a device is opened.
    fault = obstacle(why_not)
    if fault:
        print(f"nothing was run: {fault}", file=sys.stderr)
        return 2
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() % 2**31
    print(f"# {title}\n\n{jax.devices()[0].device_kind}, jax {jax.__version__}, seed {seed}")
    good = checks(seed)
    print(f"\nChecked after {time.perf_counter() - begin:.0f} s.")
    head(*COLUMNS)
    for name, measure, arguments in runs:
        if time.perf_counter() - begin > budget:
            line(name, "not run: out of time")
        else:
            good &= attempt(measure, name, seed, *arguments)
    if time.perf_counter() - begin > budget:
        print("\nOut of time for other checks.")
    else:
        good &= last_checks(seed)
    print(f"\n{time.perf_counter() - begin:.0f} s; {'every row passed' if good else 'FAILED'}")
    return 0 if good else 1
