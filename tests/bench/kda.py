"""KDA in chunks against a plain differentiated scan: time and temporaries, one interleaved run.

    python -m tests.bench.kda [TURNS]

H4 K64 on the CPU: both at 8192 tokens, then the chunks alone from 4k to 256k. Times are the best of
all turns; each turn runs everything, so a ratio is the median of the turns' own.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.kernels.kda import api, reference

HEADS, WIDTH = 4, 64
BOTH = 8192
LENGTHS = (4096, 16384, 65536, 262144)


class Program(NamedTuple):
    """One compiled function, called without arguments."""

    name: str
    tokens: int
    run: Callable[[], object]
    temporaries: int
    """Bytes."""


def operands(tokens: int) -> tuple[jax.Array, ...]:
    """One row: q, k, v, g, beta and a zero state."""
    rng = np.random.default_rng(0)
    shape = (1, tokens, HEADS, WIDTH)
    q, k, v, x = rng.standard_normal((4, *shape), np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g, beta = -5 / (1 + np.exp(2 - 3 * x)), 1 / (1 + np.exp(-v[..., 0]))
    state = np.zeros((1, HEADS, WIDTH, WIDTH), np.float32)
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta, state))


def gradients(forward: Callable) -> Callable:
    """The six gradients of a sum of squares, and the sum itself."""

    def objective(*operands):
        out, final = forward(*operands)
        return jnp.sum(out * out) + jnp.sum(final * final)

    return jax.value_and_grad(objective, argnums=tuple(range(6)))


def program(name: str, function: Callable, tokens: int) -> Program:
    given = operands(tokens)
    compiled = jax.jit(function).lower(*given).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    return Program(name, tokens, lambda: jax.block_until_ready(compiled(*given)), temporaries)


def times(programs: list[Program], turns: int) -> list[list[float]]:
    """Seconds of each, by turn.

    Each runs twice in a turn and the second counts: in the first, memory of the one before it is
    still on its way back to the system.
    """
    seconds = [[] for _ in programs]
    for _ in range(turns):
        for one, own in zip(programs, seconds, strict=True):
            one.run()
            start = time.perf_counter()
            one.run()
            own.append(time.perf_counter() - start)
    return seconds


def show(programs: list[Program], turns: int) -> None:
    """A line per program; speed, per token, is against the first."""
    print(
        "| | tokens | ms | us per token | times as fast | temporaries, MB | bytes per token |\n"
        + "|---" * 7
        + "|"
    )
    seconds = times(programs, turns)
    for one, own in zip(programs, seconds, strict=True):
        scale = one.tokens / programs[0].tokens
        ratio = statistics.median(a / b * scale for a, b in zip(seconds[0], own, strict=True))
        cells = f"{1e3 * min(own):.1f} | {1e6 * min(own) / one.tokens:.2f} | {ratio:.2f}"
        memory = f"{one.temporaries / 1e6:.1f} | {one.temporaries / one.tokens:.0f}"
        print(f"| {one.name} | {one.tokens} | {cells} | {memory} |")


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    scan = jax.vmap(reference.recurrent)
    kinds = (("scan", scan), ("chunks", api.chunked))
    for label, change in (("forward", lambda f: f), ("forward and backward", gradients)):
        show([program(f"{name}, {label}", change(f), BOTH) for name, f in kinds], turns)
    show([program("chunks", gradients(api.chunked), n) for n in LENGTHS], turns)


if __name__ == "__main__":
    main()
