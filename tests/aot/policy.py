"""A whole policy on one device: the sampler's steps and training, for every kind of device.

Widths are those of Kimi K3's layers; few layers, for every one of a kind is compiled anew.
"""

import jax
import jax.numpy as jnp

from models.kimi_linear import KimiLinearConfig, build_model
from rl_jax.sampler.cache import cache_io
from rl_jax.sampler.layout import Pages, make_layout
from rl_jax.sampler.step import StepInputs, make_sample_step
from tests.aot.run import MEBI, Program

CONFIG = KimiLinearConfig(
    vocab_size=8192,
    width=1024,
    layers=("kda", "mla"),
    heads=16,
    head_dim=128,
    kv_latent=512,
    kv_shared_key=64,
    ffn_width=2048,
    gate_rank=128,
)
SEQUENCES, CONTEXT = 64, 16384


def struct(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(jnp.int32, *shape)


def sampling(name: str, rows: int, tokens: int, limit: int, kernels: tuple[str, ...]) -> Program:
    """The pool, 2.3 GiB, stays where it is; `limit` in MiB has no room for a copy of it."""
    model = build_model(CONFIG)
    layout = make_layout(
        model.cache_spec, data=1, tensor=1, sequences=SEQUENCES, max_context=CONTEXT
    )
    pages = Pages(i32(rows, 1, layout.token_pages), i32(rows, layout.state_pages(0)))
    inputs = StepInputs(
        i32(rows, tokens),
        i32(rows),
        i32(rows),
        pages,
        struct(jnp.uint32, rows, 2),
        struct(jnp.float32, rows),
    )

    def step(params, pool, inputs):
        io = cache_io(layout, jax.sharding.get_abstract_mesh())
        return make_sample_step(model, io, 0)(params, pool, inputs)

    params = jax.eval_shape(model.init, jax.random.key(0))
    given = params, struct(jnp.uint32, *layout.shape), inputs
    return Program(name, step, given, limit * MEBI, donated=(1,), kernels=kernels)


def training(rows: int, length: int, limit: int, kernels: tuple[str, ...]) -> Program:
    """Hidden states and the gradients of all parameters; `limit` in MiB."""
    model = build_model(CONFIG)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def gradients(params, tokens, segments):
        return jax.grad(lambda p: model.forward(p, tokens, tokens, segments).sum())(params)

    given = params, i32(rows, length), i32(rows, length)
    name = f"policy training, {rows} x {length} tokens"
    return Program(name, gradients, given, limit * MEBI, kernels=kernels)
