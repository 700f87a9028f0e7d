"""Compiles the Triton launch layer of Kimi delta attention for an H200 where there is no GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=. AOT/bin/python tests/aot/kda_triton.py

in the environment that `make test-aot` builds. Checks each call's arguments against its kernel's
parameters, the memory of each program, and that decode changes the pool in place. Prints
registers, spills and shared memory of each kernel as the assembler reports them.
"""

import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_triton
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_triton import triton_lib
from triton.backends import nvidia

from rl_jax.kernels.kda import triton_launch

TARGET = (Path(__file__).parent / "h200.txtpb").read_text()
ASSEMBLER = Path(nvidia.__file__).parent / "bin" / "ptxas"
SHARED_MEMORY = 227 * 1024
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


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if name in names.split()), "operand")


def checked(dtype, seen, plain, *operands, kernel, out_shape, **options):
    """Calls through where pointers, integers and constants match the kernel's parameters."""
    settings = {"grid", "num_warps", "num_stages", "input_output_aliases"}
    constants = set(options) - settings
    given = [*operands, *out_shape]
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(given), (kernel.fn.__name__, names, len(given))
    assert constants <= set(kernel.arg_names), (kernel.fn.__name__, constants)
    for name, value in zip(names, given, strict=True):
        kind = "integer" if isinstance(value, int) else str(value.dtype)
        wanted = str(jnp.dtype(dtype)) if kind_of(name) == "operand" else kind_of(name)
        assert kind == wanted, (kernel.fn.__name__, name, kind, wanted)
    seen.add(kernel.fn.__name__)
    return plain(*operands, kernel=kernel, out_shape=out_shape, **options)


def assembled(plain, limit, *operands, **options):
    """Compiles through and prints what the assembler says; `limit` bytes may spill."""
    result = plain(*operands, **options)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(result.binary)
        command = [ASSEMBLER, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".o")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    print(
        f"  {result.name}: {registers[0]} registers, {spilled[0][0]} / {spilled[0][1]} B spilled "
        f"and reloaded per thread, {result.shared_mem_bytes >> 10} KiB shared",
        flush=True,
    )
    assert int(spilled[0][0]) <= limit, result.name
    assert result.shared_mem_bytes <= SHARED_MEMORY, result.name
    return result


def compiled(function, *structs, **options):
    lowered = jax.jit(function, **options).trace(*structs).lower(lowering_platforms=("cuda",))
    return lowered.compile().memory_analysis()


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
        jax_triton.triton_call = partial(checked, dtype, seen, plain)
        limit = SPILLED if dtype == bf16 and bounded else sys.maxsize
        triton_lib.compile_ttir_inplace = partial(assembled, compiler, limit)
        check_chunked(struct, dtype, bounded, export)
    jax_triton.triton_call = partial(checked, bf16, seen, plain)
    triton_lib.compile_ttir_inplace = partial(assembled, compiler, SPILLED)
    check_decode(struct)
    assert seen == KERNELS, seen
    print("all kernels compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
