"""Compiles the Triton launch layer of Kimi delta attention for an H200 where there is no GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=. AOT/bin/python tests/aot/kda_triton.py

in the environment that `make test-aot` builds. Checks each call's arguments against its kernel's
parameters, the memory of each program, and that decode changes the pool in place. Prints
registers, spills and shared memory of each kernel as the assembler reports them.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import jax_triton
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_triton import triton_lib

from rl_jax.kernels.kda import triton_launch
from tests.aot.h200 import TARGET, assembled, checked, compiled

SPILLED = 512
"""Bytes per thread that a kernel of bounded gates and bfloat16 operands may spill: up to 126 of the
2,700 instructions of a step of `scan_back`. Of the others it is told, not bounded."""
ROWS, LENGTH, HEADS, K, V = 2, 256, 32, 128, 128
"""As many scans as the timed shape has, so with its blocks."""
KINDS = {
    "float32": "g beta total state final after dfinal dafter dstate dg dbeta dcausal dlower",
    "integer": "heads chunks tokens words pages_per_row",
    "int32": "reset pages n_valid fresh",
    "uint32": "pool updated",
}
"""Kind of a parameter by name; every other is an operand."""
KERNELS = {
    "prepare", "scan", "replay", "scan_back", "score_cotangents", "chunk_gradients", "decode",
}  # fmt: skip


def check_chunked(struct, dtype, bounded: bool, export: bool) -> None:
    """Forward and all gradients; temporaries in units of q."""
    tokens, f32 = (ROWS, LENGTH, HEADS), partial(struct, jnp.float32)
    operands = (
        *(struct(dtype, *tokens, K), struct(dtype, *tokens, K), struct(dtype, *tokens, V)),
        *(f32(*tokens, K), f32(*tokens), f32(ROWS, HEADS, K, V)),
    )
    reset = struct(jnp.bool_, ROWS, LENGTH // 64)
    run = partial(triton_launch.chunked, bounded=bounded, export=export)

    def loss(*inputs):
        return sum(x.astype(jnp.float32).sum() for x in run(*inputs) if x is not None)

    forward = compiled(lambda *x: run(*x)[:2], *operands, reset)
    backward = compiled(jax.grad(loss, argnums=tuple(range(6))), *operands, reset)
    size = ROWS * LENGTH * HEADS * K * jnp.dtype(dtype).itemsize
    for name, memory, limit in (("forward", forward, 12), ("backward", backward, 16)):
        used = memory.temp_size_in_bytes / size
        print(
            f"{name}, {jnp.dtype(dtype)}, bounded {bounded}, exported {export}: temporaries "
            f"{used:.1f} times q, limit {limit}"
        )
        assert used <= limit


def check_decode(struct) -> None:
    """64 requests, two heads a page of 288 lines; nothing but the pool, changed in place."""
    requests, f32, i32 = 64, partial(struct, jnp.float32), partial(struct, jnp.int32)
    tokens, operand = (requests, 1, HEADS), partial(struct, jnp.bfloat16)
    pool = struct(jnp.uint32, 1024, 288, 128)
    memory = compiled(
        partial(triton_launch.decode, head_lines=144),
        *(operand(*tokens, K), operand(*tokens, K), operand(*tokens, V), f32(*tokens, K)),
        *(f32(*tokens), pool, i32(requests, HEADS // 2), i32(requests)),
        struct(jnp.bool_, requests),
        donate_argnums=5,
    )
    print(
        f"decode: temporaries {memory.temp_size_in_bytes} B, aliased {memory.alias_size_in_bytes}"
    )
    assert memory.temp_size_in_bytes <= 4 * requests
    assert memory.alias_size_in_bytes == 1024 * 288 * 128 * 4


def main() -> int:
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=TARGET
    ).devices[0]
    sharding = SingleDeviceSharding(device)
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda index: 90
    compiler = triton_lib.compile_ttir_inplace
    plain, seen = jax_triton.triton_call, set()

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    bf16, f32 = jnp.bfloat16, jnp.float32
    for dtype, bounded, export in ((bf16, True, True), (bf16, False, False), (f32, True, False)):
        jax_triton.triton_call = partial(checked, KINDS, dtype, seen, plain)
        limit = SPILLED if dtype == bf16 and bounded else sys.maxsize
        triton_lib.compile_ttir_inplace = partial(assembled, compiler, limit)
        check_chunked(struct, dtype, bounded, export)
    jax_triton.triton_call = partial(checked, KINDS, bf16, seen, plain)
    triton_lib.compile_ttir_inplace = partial(assembled, compiler, SPILLED)
    check_decode(struct)
    assert seen == KERNELS, seen
    print("all kernels compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
