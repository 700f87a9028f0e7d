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

from rl_jax.arrays import Array, Tree
from rl_jax.model import Model
from rl_jax.sampler.cache import cache_io
from rl_jax.sampler.layout import Layout, clear_pages, make_pool, pool_sharding
from rl_jax.sampler.page_table import table_of
from rl_jax.sampler.sampling import Sampled
from rl_jax.sampler.scheduler import Plan, Shapes
from rl_jax.sampler.step import StepInputs, make_sample_step
from rl_jax.sharding import DATA, replicated


class Programs(NamedTuple):
    """`steps[n]` advances rows by up to n tokens; the pool is donated to every program."""

    layout: Layout
    shapes: Shapes
    steps: Mapping[int, Callable[[Tree, Array, StepInputs], tuple[Array, Sampled]]]
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
    step = jax.jit(
        make_sample_step(model, cache_io(layout, mesh), seed, record=record),
        donate_argnums=1,
        out_shardings=(pool, rows),
    )

    def compiled(width: int) -> Callable[[Tree, Array, StepInputs], tuple[Array, Sampled]]:
        count = shapes.slots if width == 1 else shapes.prefill_rows
        inputs = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows),
            step_inputs(Plan(width, [None] * count, [0] * count), layout),
        )
        with jax.set_mesh(mesh):
            return step.lower(params, abstract_pool, inputs).compile()

    whole = replicated(mesh)
    clear = jax.jit(clear_pages, donate_argnums=0, out_shardings=pool).lower(
        abstract_pool,
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        jax.ShapeDtypeStruct((layout.pages_per_sequence,), jnp.int32, sharding=whole),
    )
    steps = {width: compiled(width) for width in (1, *shapes.prefill_tokens)}
    return Programs(layout, shapes, steps, clear.compile(), partial(make_pool, layout, mesh))


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
