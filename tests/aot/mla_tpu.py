"""The TPU programs of latent attention that `run.py` compiles, and their temporaries.

Sizes are Kimi K3's (latents of 576 with values of 512; heads of 192 and 128) and narrow ones.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from rl_jax.kernels.mla import pallas_tpu
from tests.aot.run import Program, bytes_of

BF16, F32 = jnp.bfloat16, jnp.float32


def struct(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def on_pages(rows: int, slots: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """(pool, pages, positions, n_valid)."""
    counts = struct(jnp.int32, rows)
    pool = struct(jnp.uint32, 4096, 64 * width // 128, 128)
    return pool, struct(jnp.int32, rows, slots), counts, counts


def attend(rows, n, heads, width, value_width, slots, dtype) -> Program:
    """A caller's queries may lie in another order, which is one copy of them."""
    q = struct(dtype, rows, n, heads, width)
    name = f"mla pages {rows} x {n}, {heads} x {width}, {slots} pages, {dtype.__name__}"
    run = partial(pallas_tpu.attend_pages, value_width=value_width, scale=0.1)
    return Program(name, run, (q, *on_pages(rows, slots, width)), 2 * bytes_of(q))


def write(rows, n, width) -> Program:
    """Values shifted by up to a page: a copy of them and a page a row."""
    values = struct(F32, rows, n, width)
    limit = 3 * (bytes_of(values) + rows * 64 * width * 4)
    given = *on_pages(rows, 512, width), values
    name = f"mla write {rows} x {n}, width {width}"
    return Program(name, pallas_tpu.write_pages, given, limit, donated=(0,))


def heads(length, dtype, backward) -> Program:
    """Temporaries: the operands head by head, and 128 int32 a token for places and segments."""
    q, k, v = (struct(dtype, 1, length, 8, width) for width in (192, 192, 128))

    def forward(q, k, v, segments):
        return pallas_tpu.attend_heads(q, k, v, segments, scale=0.1)

    def gradients(q, k, v, segments):
        def loss(q, k, v):
            return forward(q, k, v, segments).astype(F32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    name = f"mla heads {'back' if backward else 'for'}ward, {length} tokens, {dtype.__name__}"
    limit = (6 if backward else 4) * (bytes_of(q) + bytes_of(k) + bytes_of(v))
    given = q, k, v, struct(jnp.int32, 1, length)
    return Program(name, gradients if backward else forward, given, limit)


def programs() -> Iterator[Program]:
    yield attend(64, 1, 32, 576, 512, 512, BF16)
    yield attend(64, 1, 32, 576, 512, 16384, F32)
    yield attend(8, 16, 128, 576, 512, 512, BF16)
    yield attend(4, 512, 32, 576, 512, 512, BF16)
    yield attend(4, 512, 8, 192, 128, 512, F32)
    yield write(64, 1, 576)
    yield write(64, 16, 192)
    yield write(4, 2048, 576)
    yield heads(4096, BF16, backward=False)
    yield heads(4096, BF16, backward=True)
    yield heads(4096, F32, backward=True)
