"""[P] The sampler's programs, compiled for one mesh: every shape it will ever run.

Compiled ahead of time, so a shape or a sharding that was not planned is an error, never a retrace.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt32

from rl_jax.arrays import AnyArray, Array, Tree
from rl_jax.model import Model
from rl_jax.sampler.cache import cache_io
from rl_jax.sampler.layout import Layout, clear_pages, make_pool, pool_sharding
from rl_jax.sampler.page_table import table_of
from rl_jax.sampler.sampling import Sampled
from rl_jax.sampler.scheduler import Plan, Shapes
from rl_jax.sampler.step import StepInputs, make_sample_step
from rl_jax.sampler.words import pack, pack_columns, unpack
from rl_jax.sharding import DATA, replicated


class Words(NamedTuple):
    """What a step sampled, on the device."""

    columns: UInt32[Array, "R 4"]
    choices: Array | None


class Programs(NamedTuple):
    """`steps[n]` advances rows by up to n tokens, told as `pack(step_inputs(..))` and read by
    `sampled_of`; the pool is donated to every program."""

    layout: Layout
    shapes: Shapes
    steps: Mapping[int, Callable[[Tree, Array, AnyArray], tuple[Array, Words]]]
    clear: Callable[[Array, Any, Any], Array]
    make_pool: Callable[[], Array]


def compile_programs(
    model: Model,
    params: Tree,
    layout: Layout,
    shapes: Shapes,
    mesh: Mesh,
    seed: int,
    *,
    record: bool = False,
) -> Programs:
    """`params` may be abstract: `jax.ShapeDtypeStruct`s with the sampler's shardings. With `record`
    every step tells which experts its tokens went to."""
    pool = pool_sharding(mesh)
    abstract_pool = jax.ShapeDtypeStruct(layout.shape, jnp.uint32, sharding=pool)
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    step = make_sample_step(model, cache_io(layout, mesh), seed, record=record)

    def compiled(width: int) -> Callable[[Tree, Array, AnyArray], tuple[Array, Words]]:
        count = shapes.slots if width == 1 else shapes.prefill_rows
        idle = step_inputs(Plan(width, [None] * count, [0] * count), layout)

        def on_words(params: Tree, pool: Array, words: Array) -> tuple[Array, Words]:
            pool, sampled = step(params, pool, unpack(words, idle))
            return pool, Words(pack_columns(sampled[:4]), sampled.choices)

        own = jax.jit(on_words, donate_argnums=1, out_shardings=(pool, rows))
        packed = jax.ShapeDtypeStruct(pack(idle).shape, jnp.uint32, sharding=rows)
        with jax.set_mesh(mesh):
            return own.lower(params, abstract_pool, packed).compile()

    whole = replicated(mesh)
    clear = jax.jit(clear_pages, donate_argnums=0, out_shardings=pool).lower(
        abstract_pool,
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        jax.ShapeDtypeStruct((layout.pages_per_sequence,), jnp.int32, sharding=whole),
    )
    steps = {width: compiled(width) for width in (1, *shapes.prefill_tokens)}
    return Programs(layout, shapes, steps, clear.compile(), partial(make_pool, layout, mesh))


def sampled_of(words: Words) -> Sampled:
    """On the host, when it is there."""
    columns, choices = jax.device_get(words)
    tokens, logprobs, raw, finite = columns.T.copy()
    logprobs, raw = logprobs.view(np.float32), raw.view(np.float32)
    return Sampled(tokens.view(np.int32), logprobs, raw, finite.astype(bool), choices)


def step_inputs(step: Plan, layout: Layout) -> StepInputs:
    """The host arrays of a planned step."""
    count = len(step.rows)
    tokens = np.zeros((count, step.width), np.int32)
    positions = np.zeros(count, np.int32)
    streams = np.zeros((count, 2), np.uint32)
    temperature = np.zeros(count, np.float32)
    for index, (sequence, n) in enumerate(zip(step.rows, step.counts, strict=True)):
        if sequence is None:
            continue
        tokens[index, :n] = sequence.tokens[sequence.cached : sequence.cached + n]
        positions[index] = sequence.cached
        if sequence.running:
            streams[index] = sequence.running.stream
            temperature[index] = sequence.running.request.temperature
    table = table_of([s.row if s else None for s in step.rows], layout)
    n_valid = np.asarray(step.counts, np.int32)
    return StepInputs(tokens, n_valid, positions, table, streams, temperature)
