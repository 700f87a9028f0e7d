"""[H] The trainer's device: its state exactly, what a step adds to it by estimate."""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from launch import build
from launch.plan.activations import kept
from launch.plan.base import Part, Program, bytes_of, total
from rl_jax.arrays import Tree
from rl_jax.config.run import RunConfig
from rl_jax.model import Model
from rl_jax.sharding import CONTEXT, DATA, EXPERT, FSDP, TENSOR
from rl_jax.trainer.batches import empty_batch
from rl_jax.trainer.log_softmax import chunk_rows
from rl_jax.trainer.loop import Auditor
from rl_jax.trainer.state import CRITIC, POLICY

PUBLISHED, BATCH = "published copies kept for the audit", "batch"
"""Parts that do not stand with their like: held beside the step, and an argument of it."""
CHUNKS = 3
"""Arrays of [tokens, a chunk of the vocabulary] at once: logits, probabilities, their gradient."""


def plan_trainer(config: RunConfig, model: Model, plain: Model) -> Program:
    """Of a run of `config`; `plain` is the model with all activations kept.

    ValueError naming a parameter that does not divide over the mesh.
    """
    sizes = config.mesh.trainer.model_dump()
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    own = config.trainer
    options = build.step_options(config, model)
    loss, critic = build.build_loss(config), build.build_critic(config)
    optimizer = build.build_optimizer(config)
    state = build.abstract_state(model, loss, optimizer, mesh, critic, options.storage)
    others = {name: tree for name, tree in state.params.items() if name not in (POLICY, CRITIC)}
    served = build.abstract_params(model, mesh, config.sampler.param_dtype)
    scored = build.abstract_params(model, mesh, own.param_dtype)
    batch = empty_batch(build.rl_shape(config), options.choices)
    cut = prod(sizes[axis] for axis in (DATA, FSDP, EXPERT, CONTEXT))
    held = (
        Part("masters" if own.param_dtype != options.storage.trained else "parameters",
             bytes_of(state.params[POLICY]), True),
        Part("critic", bytes_of(state.params.get(CRITIC, ())), True),
        Part("weights of other scores", bytes_of(others), True),
        Part("optimizer", bytes_of(state.optimizer), True),
        Part(PUBLISHED, Auditor.KEPT * bytes_of(served), True),
    )  # fmt: skip
    step = (
        Part(BATCH, sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) // cut, True),
        *_step(config, model, plain, scored, options.storage.trained),
    )
    moments = {
        "update": step,
        "push": (Part("staging of a push", bytes_of(served), True),),
        "checkpoint": (Part("copy of the state", bytes_of(state), True),),
    }
    return Program("trainer", sizes, held, moments)


def _step(
    config: RunConfig, model: Model, plain: Model, scored: Tree, trained: str
) -> tuple[Part, ...]:
    """What the step's program needs besides its arguments."""
    own, sizes = config.trainer, config.mesh.trainer.model_dump()
    tensor = sizes[TENSOR]
    rows = sizes[DATA] * sizes[FSDP] * sizes[EXPERT]
    tokens = own.rows_per_microbatch // rows * (own.row_length // sizes[CONTEXT])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scored)
    per_token = kept(model, shapes, own.row_length).on(tensor)
    if config.model.remat != "none":
        # One block at a time is computed again with everything that it would keep. That of the
        # mean block, without its gradients: of blocks that differ, and of experts, too little.
        per_token += kept(plain, shapes, own.row_length).on(tensor) / layers_of(config)
    count = sum(prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(scored))
    chunk = chunk_rows(model.vocab_size, build.vocab_chunk(model), tensor)
    compute = jnp.dtype(config.model.compute).itemsize
    cast = count * compute if compute < jnp.dtype(own.param_dtype).itemsize else 0
    stacked = count * compute if config.model.scan else 0
    rounded = bytes_of(scored) if own.param_dtype != trained else 0
    return (
        Part("rounded copy of the masters", rounded, True),
        Part("weights cast and stacked", max(cast, stacked), False),
        Part("gradients, summed", 4 * count, True),
        Part("gradients of a microbatch", bytes_of(scored), False),
        Part("activations", round(tokens * per_token), False),
        Part("logits of a chunk", CHUNKS * 4 * tokens * chunk, False),
    )


def layers_of(config: RunConfig) -> int:
    """Blocks of the policy."""
    layers = config.model.layers
    return layers if isinstance(layers, int) else len(layers)


def compared(program: Program) -> Mapping[str, int]:
    """What XLA's own analysis counts of the step: state and batch as arguments, and the rest."""
    step = program.moments["update"]
    state = tuple(part for part in program.held if part.name != PUBLISHED)
    return {
        "arguments": total(state + tuple(part for part in step if part.name == BATCH)),
        "temporaries": total(tuple(part for part in step if part.name != BATCH)),
    }
