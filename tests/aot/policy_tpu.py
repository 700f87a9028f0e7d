"""The TPU programs of a whole policy that `run.py` compiles, and of kernels on a mesh."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.mla import api as mla
from tests.aot.policy import sampling, struct, training
from tests.aot.run import MEBI, Program

TOKENS = PartitionSpec("data", None, "tensor")

f32, i32 = partial(struct, jnp.float32), partial(struct, jnp.int32)


def on_a_mesh(name, function, operands, cuts, limit, kernels) -> Program:
    """Gradients of everything with two data and two tensor shards; `limit` in MiB."""
    differentiated = tuple(i for i, x in enumerate(operands) if x.dtype != jnp.int32)

    def loss(*operands):
        return sum(x.astype(jnp.float32).sum() for x in function(*operands))

    run = jax.grad(loss, differentiated)
    return Program(name, run, operands, limit * MEBI, mesh=(2, 2), cuts=cuts, kernels=kernels)


def programs() -> Iterator[Program]:
    page_kernels = "write_pages", "attend_pages"
    yield sampling("policy decode, 64 rows", 64, 1, 128, ("kda_decode", *page_kernels))
    yield sampling("policy prefill, 4 x 256 tokens", 4, 256, 256, ("kda_forward", *page_kernels))
    train_kernels = "kda_forward", "kda_backward", "splash_mha_fwd", "splash_mha_dkv"
    yield training(2, 2048, 2048, train_kernels)
    shape, bf16 = (4, 1024, 16), partial(struct, jnp.bfloat16)
    operands = (*(bf16(*shape, 128),) * 3, f32(*shape, 128), f32(*shape))
    name, kernels = "kda backward, 2 x 2 devices", ("kda_forward", "kda_backward")
    yield on_a_mesh(name, kda.chunked, operands, (TOKENS,) * 5, 16, kernels)
    operands = (bf16(*shape, 192), bf16(*shape, 192), bf16(*shape, 128), i32(4, 1024))

    def attention(*operands):
        return (mla.attend_heads(*operands, scale=0.1),)

    cuts = *(TOKENS,) * 3, PartitionSpec("data")
    name, kernels = "mla heads backward, 2 x 2 devices", ("splash_mha_fwd", "splash_mha_dkv")
    # A device's operands by head, 192 numbers padded to 256, are 33.5 MiB (tpu7x copies them);
    # gathered they would be four times as much.
    yield on_a_mesh(name, attention, operands, cuts, 40, kernels)
