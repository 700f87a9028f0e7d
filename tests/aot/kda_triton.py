"""Compiles the Triton launch layer of Kimi delta attention for an H200 where there is no GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=. AOT/bin/python tests/aot/kda_triton.py

in an environment made from requirements-triton.txt. Checks each call's arguments against its
kernel's parameters, the memory of each program, and that decode changes the pool in place.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_triton
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_triton import triton_lib

from rl_jax.kernels.kda import triton_launch

TARGET = (Path(__file__).parent / "h200.txtpb").read_text()
ROWS, LENGTH, HEADS, K, V = 2, 256, 4, 128, 64
OF_KERNEL = {"q": 0, "k": 0, "do": 0, "out": 0, "g": 1, "beta": 1, "total": 1, "final": 1,
             "dfinal": 1, "dstate": 1, "after": 1, "dafter": 1, "dg": 1, "dbeta": 1, "reset": 2,
             "pages": 2, "n_valid": 2, "state": 1, "heads": 3, "chunks": 3, "tokens": 3,
             "words": 3, "pages_per_row": 3, "pool": 4, "updated": 4}  # fmt: skip
"""Kind of a parameter: 0 operand dtype (so is every other name), 1 float32, 2 int32, 3 integer."""


def kind(value, dtype) -> int:
    if isinstance(value, int):
        return 3
    return (
        {jnp.dtype(jnp.float32): 1, jnp.dtype(jnp.int32): 2, jnp.dtype(jnp.uint32): 4}.get(
            value.dtype, 0
        )
        if value.dtype != dtype
        else 0
    )


def checked(dtype, seen, plain, *operands, kernel, out_shape, **options):
    """Calls through where pointers, integers and constants match the kernel's parameters."""
    settings = {"grid", "num_warps", "num_stages", "input_output_aliases"}
    constants = {name for name in options if name not in settings}
    given = [*operands, *out_shape]
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(given), (kernel.fn.__name__, names, len(given))
    assert constants <= set(kernel.arg_names), (kernel.fn.__name__, constants)
    for name, value in zip(names, given, strict=True):
        wanted = 0 if name == "ranges" else OF_KERNEL.get(name, 0)
        assert dtype == jnp.float32 or kind(value, dtype) == wanted, (kernel.fn.__name__, name)
    seen.add(kernel.fn.__name__)
    return plain(*operands, kernel=kernel, out_shape=out_shape, **options)


def compiled(function, *structs, **options):
    lowered = jax.jit(function, **options).trace(*structs).lower(lowering_platforms=("cuda",))
    return lowered.compile().memory_analysis()


def main() -> int:
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=TARGET
    ).devices[0]
    sharding = SingleDeviceSharding(device)
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda index: 90
    plain = jax_triton.triton_call

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    f32, i32 = partial(struct, jnp.float32), partial(struct, jnp.int32)
    seen: set[str] = set()
    for dtype, bounded, export in ((jnp.bfloat16, True, True), (jnp.bfloat16, False, False)):
        jax_triton.triton_call = partial(checked, dtype, seen, plain)
        tokens = ROWS, LENGTH, HEADS
        operands = (
            *(struct(dtype, *tokens, K), struct(dtype, *tokens, K), struct(dtype, *tokens, V)),
            *(f32(*tokens, K), f32(*tokens), f32(ROWS, HEADS, K, V)),
        )
        reset = struct(jnp.bool_, ROWS, LENGTH // 64)
        run = partial(triton_launch.chunked, bounded=bounded, export=export)

        def loss(*inputs, run=run):
            return sum(x.astype(jnp.float32).sum() for x in run(*inputs) if x is not None)

        forward = compiled(lambda *x, run=run: run(*x)[:2], *operands, reset)
        backward = compiled(jax.grad(loss, argnums=tuple(range(6))), *operands, reset)
        size = ROWS * LENGTH * HEADS * K * jnp.dtype(dtype).itemsize
        for name, memory, limit in (("forward", forward, 7), ("backward", backward, 24)):
            used = memory.temp_size_in_bytes / size
            print(f"{name}, bounded {bounded}: temporaries {used:.1f} times q, limit {limit}")
            assert used <= limit
    requests, words = 64, K * V + 3 * (2 * K + V)
    tokens = requests, 1, HEADS
    operand = partial(struct, jnp.bfloat16)
    pool = struct(jnp.uint32, 1024, 18432)
    memory = compiled(
        partial(triton_launch.decode, head_words=words),
        *(operand(*tokens, K), operand(*tokens, K), operand(*tokens, V), f32(*tokens, K)),
        *(f32(*tokens), i32(requests, HEADS), i32(requests), pool),
        donate_argnums=7,
    )
    print(
        f"decode: temporaries {memory.temp_size_in_bytes} B, aliased {memory.alias_size_in_bytes}"
    )
    assert memory.temp_size_in_bytes == 0
    assert memory.alias_size_in_bytes == 1024 * 18432 * 4
    assert seen == {"prepare", "scan", "replay", "scan_back", "score_cotangents",
                    "chunk_gradients", "decode"}, seen  # fmt: skip
    print("all kernels compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
