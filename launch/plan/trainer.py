"""[H] The trainer's device: its state exactly, what a step adds to it by estimate."""

from collections.abc import Mapping
from math import prod

import jax
from jax.sharding import AbstractMesh

from launch import build
from launch.plan.activations import temporaries
from launch.plan.base import Part, Program, bytes_of, total
from rl_jax.arrays import Tree
from rl_jax.config.run import RunConfig
from rl_jax.model import Model
from rl_jax.sharding import CONTEXT, DATA, EXPERT, FSDP
from rl_jax.trainer.batches import empty_batch
from rl_jax.trainer.loop import Auditor
from rl_jax.trainer.state import CRITIC, POLICY

PUBLISHED, BATCH = "published copies kept for the audit", "batch"
"""Parts that do not stand with their like: held beside the step, and an argument of it."""
ACTIVATIONS = "activations and their gradients"
"""With the gradients of a microbatch and cast or stacked weights: all that is there at the fullest
moment besides."""


def plan_trainer(config: RunConfig, model: Model) -> Program:
    """Of a run of `config`.

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
        *_step(config, model, scored, options.storage.trained),
    )
    moments = {
        "update": step,
        "push": (Part("staging of a push", bytes_of(served), True),),
        "checkpoint": (Part("copy of the state", bytes_of(state), True),),
    }
    return Program("trainer", sizes, held, moments)


def _step(config: RunConfig, model: Model, scored: Tree, trained: str) -> tuple[Part, ...]:
    """What the step's program needs besides its arguments."""
    own, mesh = config.trainer, config.mesh.trainer
    count = sum(prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(scored))
    rounded = bytes_of(scored) if own.param_dtype != trained else 0
    summed, there = 4 * count, temporaries(config, model.vocab_size)
    # Gathered for its products, one block after the other.
    gathered = _largest_block(scored) * (mesh.fsdp * mesh.context - 1)
    return (
        Part("rounded copy of the masters", rounded, True),
        Part("gradients, summed", summed, True),
        Part("weights of a block, gathered", gathered, False),
        Part(ACTIVATIONS, max(there - rounded - summed, 0), False),
    )


def _largest_block(params: Tree) -> int:
    """Bytes of a device's part of the block with most."""
    return max(map(bytes_of, params["blocks"].values()))


def compared(program: Program) -> Mapping[str, int]:
    """What XLA's own analysis counts of the step: state and batch as arguments, and the rest."""
    step = program.moments["update"]
    state = tuple(part for part in program.held if part.name != PUBLISHED)
    return {
        "arguments": total(state + tuple(part for part in step if part.name == BATCH)),
        "temporaries": total(tuple(part for part in step if part.name != BATCH)),
    }
