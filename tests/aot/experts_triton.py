"""Compiles the Triton launch layer of a mixture of experts for an H200 where there is no GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=. AOT/bin/python tests/aot/experts_triton.py

in the environment that `make test-aot` builds. Checks each call's arguments against its kernel's
parameters and that temporaries grow with tokens, not with tokens times experts. Prints registers,
spills and shared memory of each kernel as the assembler reports them; nothing may spill.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import jax_triton
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_triton import triton_lib

from rl_jax.kernels.experts import triton_launch, xla
from tests.aot.h200 import TARGET, assembled, checked, compiled

KINDS = {"int32": "groups first end"}
"""Kind of a parameter by name; every other is an operand."""


def check(struct, dtype, tokens=512, chosen=4, experts=16, width=256, hidden=128):
    """Forward and backward; temporaries are copies of tokens and what experts make of them."""
    x = struct(dtype, tokens, width)
    matrices = *(struct(dtype, experts, width, hidden),) * 2, struct(dtype, experts, hidden, width)
    weights = struct(jnp.float32, tokens, chosen)

    def pull(x, choices, weights, gate, up, down, cotangent):
        run = partial(xla.mix, product=triton_launch.grouped)
        return jax.vjp(lambda x, *rest: run(x, choices, *rest), x, weights, gate, up, down)[1](
            cotangent
        )

    memory = compiled(pull, x, struct(jnp.int32, tokens, chosen), weights, *matrices, x)
    limit = 6 * tokens * chosen * (width + hidden) * jnp.dtype(dtype).itemsize
    print(f"{dtype.__name__}: temporaries {memory.temp_size_in_bytes} B, limit {limit}")
    assert memory.temp_size_in_bytes <= limit


def main() -> int:
    device = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=TARGET
    ).devices[0]
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda index: 90
    triton_lib.compile_ttir_to_ptx_inplace = partial(
        assembled, triton_lib.compile_ttir_to_ptx_inplace, 0
    )
    plain, seen = jax_triton.triton_call, set()

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    for dtype in (jnp.bfloat16, jnp.float32):
        jax_triton.triton_call = partial(checked, KINDS, dtype, seen, plain)
        check(struct, dtype)
    assert seen == {"rows_product", "groups_product"}, seen
    print("all kernels compiled")
    return 0


if __name__ == "__main__":
    sys.exit(main())
