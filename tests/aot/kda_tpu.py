"""The TPU programs of Kimi delta attention that `run.py` compiles, and their temporaries."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from rl_jax.kernels.kda import pallas_tpu, pallas_tpu_decode
from tests.aot.run import Program, bytes_of

ROWS, LENGTH, HEADS = 2, 2048, 16
MARGIN = 1 << 20
"""Bytes beside what a bound names: constants, and padding to whole registers."""


def struct(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


f32 = partial(struct, jnp.float32)


def operands(dtype, heads: int, key_width: int, value_width: int) -> tuple:
    tokens = ROWS, LENGTH, heads
    return (
        *(struct(dtype, *tokens, width) for width in (key_width, key_width, value_width)),
        *(f32(*tokens, key_width), f32(*tokens), f32(ROWS, heads, key_width, value_width)),
        struct(jnp.bool_, ROWS, LENGTH // 64),
    )


def chunks(name: str, dtype, heads=HEADS, widths=(128, 128), bounded=True, export=False):
    """Forward: beta by blocks. Backward: also the outputs and the states entering groups."""
    given = operands(dtype, heads, *widths)
    run = partial(pallas_tpu.chunked, bounded=bounded, export=export)
    betas = ROWS * LENGTH * heads * 64
    """A number per token and head in registers of 128 lanes, eight heads each."""
    yield Program(f"kda forward {name}", run, given, betas + MARGIN)
    out, final = given[2], given[5]
    cotangents = [out, final]
    if export:
        cotangents.append(f32(LENGTH // 64, *final.shape))

    def pull(*operands):
        *tokens, reset = operands[:7]
        made, back = jax.vjp(lambda *x: run(*x, reset), *tokens)
        return back((*operands[7:], None) if made[2] is None else tuple(operands[7:]))

    entering = bytes_of(final) * -(-LENGTH // 64 // 8)
    forward = bytes_of(out) + entering + bytes_of(final) + (export and bytes_of(cotangents[-1]))
    limit = forward + 3 * betas + MARGIN
    yield Program(f"kda backward {name}", pull, (*given, *cotangents), limit)


def decodes(name: str, dtype, rows: int, tokens: int, heads: int, value_width: int = 128):
    """Nothing but beta in registers of 128 lanes beside the pool, which stays where it is."""
    lines = 128 * value_width // 128
    head_lines = -(-(lines + 9) // 8) * 8
    shape = rows, tokens, heads
    given = (
        *(struct(dtype, *shape, width) for width in (128, 128, value_width)),
        *(f32(*shape, 128), f32(*shape)),
        struct(jnp.uint32, 4096, 2 * head_lines, 128),
        *(struct(jnp.int32, rows, heads // 2), struct(jnp.int32, rows)),
        struct(jnp.bool_, rows),
    )
    run = partial(pallas_tpu_decode.decode, head_lines=head_lines)
    limit = rows * tokens * heads * 512 + MARGIN
    yield Program(f"kda decode {name}", run, given, limit, donated=(5,))


def programs() -> Iterator[Program]:
    yield from chunks("bfloat16", jnp.bfloat16)
    yield from chunks("bfloat16 without a bound", jnp.bfloat16, bounded=False)
    yield from chunks("float32, exporting states", jnp.float32, heads=8, export=True)
    yield from chunks("bfloat16, four heads", jnp.bfloat16, heads=4)
    yield from decodes("64 rows, 32 heads, 1 token", jnp.bfloat16, 64, 1, 32)
    yield from decodes("8 rows, 32 heads, 16 tokens", jnp.bfloat16, 8, 16, 32)
    yield from decodes("8 rows, 4 heads, 3 tokens, V 256", jnp.float32, 8, 3, 4, 256)
