"""[H] Where RL starts: a snapshot, or a few supervised steps on scripted demonstrations."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from launch import build
from launch.background import in_background
from launch.terminal import Reporter
from rl_jax import rng
from rl_jax.arrays import Tree
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.renderer import Renderer
from rl_jax.losses import recipes
from rl_jax.model import Model
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.tasks.base import TaskFamily
from rl_jax.trainer.anchors import teachers
from rl_jax.trainer.batches import batch_shape, build_batch
from rl_jax.trainer.state import adam
from rl_jax.trainer.step import Experts
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status, Trajectory

GoesOn = Callable[[], Awaitable[bool]]
"""Whether no process of the trainer's world was asked to stop."""
POOL = 4096
"""Demonstrations that are made; every step draws from them."""


def first_params(config: RunConfig, model: Model, mesh: Mesh) -> Tree:
    """The snapshot that the configuration names, else fresh parameters, on the trainer's mesh.

    UserError where the snapshot is missing, corrupt, or of another model.
    """
    if config.warm_start.snapshot is None:
        return build.init_params(model, config.seed, mesh)
    return _snapshot(config.warm_start.snapshot, "warm_start.snapshot", model, mesh)


def load_teachers(config: RunConfig, model: Model, mesh: Mesh) -> dict[str, Tree]:
    """The teachers that the loss asks for, by name, on the trainer's mesh.

    UserError where a snapshot is missing, corrupt, or of another model.
    """
    return {
        name: _snapshot(config.teachers[name], f"teachers.{name}", model, mesh)
        for name in teachers(build.build_loss(config).transform.needs)
    }


def _snapshot(directory: str, key: str, model: Model, mesh: Mesh) -> Tree:
    path = Path(directory)
    if not path.name.isdecimal():
        raise UserError(f"{key} = {directory!r}: needs a version's directory, as DIR/0")
    try:
        store = SnapshotStore(path.parent)
        return store.load(int(path.name), build.abstract_params(model, mesh))
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error


async def warm_start(
    config: RunConfig,
    model: Model,
    params: Tree,
    family: TaskFamily,
    renderer: Renderer,
    dispatcher: Dispatcher,
    reporter: Reporter,
    goes_on: GoesOn,
) -> Tree | None:
    """`config.warm_start.steps` supervised steps from `params`, which are consumed.

    Seeded by the run's seed alone. None where `goes_on`, asked before every step, says no.
    """
    own = config.warm_start
    if not own.steps or own.snapshot is not None:
        return params
    reporter.phase("warm start", own.steps)
    count = min(POOL, len(family.train), own.steps * own.trajectories)
    demonstrations = [demonstration(family, renderer, index) for index in range(count)]
    longest = max(len(d.tokens) for d in demonstrations)
    if longest > config.trainer.row_length:
        raise UserError(
            f"trainer.row_length = {config.trainer.row_length}: needs at least {longest}, the "
            "tokens of the longest demonstration"
        )
    shape = batch_shape(
        own.trajectories, longest, config.trainer.rows_per_microbatch, config.trainer.row_length
    )
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    loss = recipes.supervised()
    optimizer = adam(own.learning_rate, warmup_steps=10, total_steps=own.steps, final_share=0.0)
    options = build.StepOptions(experts=Experts(bias_rate=config.trainer.router_bias_rate))
    where = model, loss, optimizer, mesh, shape, None, frozenset(), options
    compiling = partial(build.compile_step, *where)
    program = await in_background(compiling)
    state = program.init(params)
    draws = rng.host(config.seed, rng.Purpose.WARM_START)
    for step in range(1, own.steps + 1):
        if not await goes_on():
            return None
        chosen = [demonstrations[i] for i in draws.integers(count, size=own.trajectories)]
        batch = build_batch(chosen, loss.reduction, 0, shape).batch
        state, report = await dispatcher.run(program.step, state, batch)
        reporter.progress(step, loss=float(report.loss))
    return state.params["policy"]


def demonstration(family: TaskFamily, renderer: Renderer, index: int) -> Trajectory:
    """The demonstration for training prompt `index` as the trajectory a rollout would have left."""
    tokens, mask = renderer.tokenize(family.demonstration(index))
    return Trajectory(
        key=RolloutKey(f"{family.train.name}-demonstration", index, 0),
        tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
        segments=(),
        temperature=1.0,
        reward=1.0,
        status=Status.COMPLETED,
    )
