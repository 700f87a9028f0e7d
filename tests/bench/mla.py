"""Attention of packed rows against jax.nn.dot_product_attention: time and temporaries, interleaved.

    python -m tests.bench.mla [TOKENS] [TURNS]

One row of one long segment, and of segments of 64 tokens; absorbed (width 576, values 512) and
with keys per head (192, 128), 4 heads. Ratios are of the field's time, or temporaries, to ours.
"""

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.kernels.mla import api
from tests.bench.kda import Program

HEADS = 4
SHORT = 64
"""Tokens of a short segment."""
ABSORBED, EXPANDED = (576, 512), (192, 128)
"""Widths of keys and values."""


def operands(tokens: int, kind: str, segment: int) -> tuple[jax.Array, ...]:
    """Of one row: queries, latents or keys and values, and segments of so many tokens."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((1, tokens, *shape), np.float32))

    segments = jnp.asarray(np.arange(tokens)[None] // segment, jnp.int32)
    if kind == "absorbed":
        return normal(HEADS, ABSORBED[0]), normal(ABSORBED[0]), segments
    keys, values = EXPANDED
    return normal(HEADS, keys), normal(HEADS, keys), normal(HEADS, values), segments


def ours(kind: str) -> Callable:
    """(operands) -> out."""
    if kind == "absorbed":
        return lambda *x: api.attend_rows(*x, value_width=ABSORBED[1], scale=0.05)
    return lambda *x: api.attend_heads(*x, scale=0.05)


def field(kind: str) -> Callable:
    """The same through jax.nn, which wants values as wide as keys."""

    def attend(q, k, v, segments):
        mask = segments[:, None, :, None] == segments[:, None, None, :]
        width = v.shape[-1]
        v = jnp.pad(v, (*((0, 0),) * 3, (0, k.shape[-1] - width)))
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, scale=0.05)
        return out[..., :width]

    if kind == "absorbed":
        return lambda q, c, s: attend(q, c[:, :, None], c[:, :, None, : ABSORBED[1]], s)
    return attend


def program(name: str, function: Callable, given: tuple[jax.Array, ...], both: bool) -> Program:
    """Forward, or also the gradients of a sum of squares."""

    def objective(*given):
        return jnp.sum(function(*given) ** 2)

    inexact = tuple(range(len(given) - 1))
    run = jax.value_and_grad(objective, inexact) if both else function
    compiled = jax.jit(run).lower(*given).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    call, temporaries = lambda: jax.block_until_ready(compiled(*given)), analysis.temp_size_in_bytes
    return Program(name, given[0].shape[1], call, temporaries)


def best_times(programs: list[Program], turns: int) -> list[float]:
    """Seconds, the best of `turns`, all programs once per turn after one turn to warm up."""
    best = [float("inf")] * len(programs)
    for turn in range(turns + 1):
        for i, one in enumerate(programs):
            start = time.perf_counter()
            one.run()
            if turn:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    print("| | ms | MB | times as fast | times less memory |\n" + "|---" * 5 + "|")
    for kind in ("absorbed", "expanded"):
        for segment in (tokens, SHORT):
            given = operands(tokens, kind, segment)
            for both in (False, True):
                what = "forward and backward" if both else "forward"
                name = f"{kind}, segments of {segment}, {what}"
                pair = [program(name, f(kind), given, both) for f in (ours, field)]
                own, other = best_times(pair, turns)
                memory = pair[1].temporaries / pair[0].temporaries
                cells = f"{1e3 * own:.1f} | {pair[0].temporaries / 1e6:.1f}"
                print(f"| {name} | {cells} | {other / own:.1f} | {memory:.1f} |", flush=True)


if __name__ == "__main__":
    main()
