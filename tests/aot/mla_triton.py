"""Compiles the Triton launch layer of latent attention for an H200 where there is no GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=. AOT/bin/python tests/aot/mla_triton.py

in the environment that `make test-aot` builds. Checks each call's arguments against its kernel's
parameters and the temporaries of each program, and that tokens are written into the pool
in place. Prints registers, spills and shared memory of each kernel as the assembler reports them.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import jax_triton
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_triton import triton_lib

from rl_jax.kernels.mla import block_sizes, pages, triton_launch
from tests.aot.h200 import TARGET, assembled, checked, compiled

KINDS = {
    "float32": "log_mass delta peaks masses sums",
    "integer": "heads length keys count lines parts width",
    "int32": "segments of_keys at first clear last pages positions n_valid",
    "uint32": "pool",
}
"""Kind of a parameter by name; every other is an operand."""


def check_heads(struct, dtype, width, value_width, rows=2, length=320, heads=3):
    """Temporaries of the backward pass: out, its sums, log-masses and cotangents at most."""
    q = struct(dtype, rows, length, heads, width)
    v = struct(dtype, rows, length, heads, value_width)
    segments = struct(jnp.int32, rows, length)
    run = partial(triton_launch.attend_heads, scale=width**-0.5)
    memory = compiled(run, q, q, v, segments)
    logs = 4 * rows * length * heads
    spans = 1 << 14
    print(f"forward {dtype.__name__} {width}/{value_width}: temporaries "
          f"{memory.temp_size_in_bytes} B, log-masses {logs}")  # fmt: skip
    assert memory.temp_size_in_bytes <= logs + spans

    def pull(do, q, k, v, segments):
        return jax.vjp(lambda *x: run(*x, segments), q, k, v)[1](do)

    memory = compiled(pull, v, q, q, v, segments)
    out = rows * length * heads * value_width * jnp.dtype(dtype).itemsize
    print(f"backward: temporaries {memory.temp_size_in_bytes} B, outputs {out}, log-masses {logs}")
    assert memory.temp_size_in_bytes <= out + 2 * logs + spans


def check_pages(struct, dtype, width, value_width, tokens, heads=32, requests=8, table=64):
    """Temporaries: peak, mass and values of every part of a decode; nothing of a prefill."""
    memory = compiled(
        partial(triton_launch.attend_pages, value_width=value_width, scale=0.1),
        struct(dtype, requests, tokens, heads, width),
        struct(jnp.uint32, 1024, -(-64 * width // 1024) * 8, 128),
        struct(jnp.int32, requests, table),
        *(struct(jnp.int32, requests),) * 2,
    )
    parts = -(-table // block_sizes.PART) if tokens <= triton_launch.SHORT else 0
    limit = requests * parts * tokens * heads * (value_width + 2) * 4
    print(f"pages {dtype.__name__} {width}/{value_width}, {tokens} tokens: temporaries "
          f"{memory.temp_size_in_bytes} B, limit {limit}")  # fmt: skip
    assert memory.temp_size_in_bytes <= limit + 1024


def check_write(struct):
    """XLA's scatter into a pool of 9.7 GB: no copy."""
    pool = struct(jnp.uint32, 65536, 288, 128)
    numbers = struct(jnp.int32, 64, 512), *(struct(jnp.int32, 64),) * 2
    values = struct(jnp.float32, 64, 16, 576)
    memory = compiled(pages.write_pages, pool, *numbers, values, donate_argnums=0)
    print(f"write: temporaries {memory.temp_size_in_bytes} B, aliased {memory.alias_size_in_bytes}")
    assert memory.temp_size_in_bytes == 0
    assert memory.alias_size_in_bytes == pool.size * 4


def main() -> int:
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=TARGET
    ).devices[0]
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda index: 90
    triton_lib.compile_ttir_to_ptx_inplace = partial(
        assembled, triton_lib.compile_ttir_to_ptx_inplace, sys.maxsize
    )
    plain, seen = jax_triton.triton_call, set()

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    for dtype, sizes in ((jnp.bfloat16, (192, 128)), (jnp.float32, (48, 32))):
        jax_triton.triton_call = partial(checked, KINDS, dtype, seen, plain)
        check_heads(struct, dtype, *sizes)
    for dtype, sizes in ((jnp.bfloat16, (576, 512)), (jnp.float32, (48, 32))):
        jax_triton.triton_call = partial(checked, KINDS, dtype, seen, plain)
        for tokens in (1, 16, 64):
            check_pages(struct, dtype, *sizes, tokens)
    check_pages(struct, jnp.float32, 576, 512, 1)
    check_write(struct)
    assert seen == {"heads_forward", "heads_query_gradients", "heads_key_gradients",
                    "pages_part", "pages_merge", "pages_prefill"}, seen  # fmt: skip
    print("all kernels compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
