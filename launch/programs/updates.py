"""[H] What every process of a trainer's world does, in one order: programs on the trainer's mesh.

A trainer of one process is a world of one. What is written and told is not here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh

from launch import build
from launch.background import in_background
from launch.programs.base import Parts
from launch.stop import Stop
from launch.warm_start import GoesOn, first_params, load_teachers, warm_start
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.snapshots.manifest import Leaf
from rl_jax.snapshots.publisher import copy_tree
from rl_jax.snapshots.shared import describe_shared, save_shared
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import (
    Auditor,
    Critic,
    Hooks,
    Programs,
    Pushed,
    Schedule,
    Take,
    Taken,
    train,
)
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.world import agreed, never, shared_take


class Compiled(NamedTuple):
    """The trainer's programs and what makes a first state."""

    step: build.StepProgram
    programs: Programs


class Weights(NamedTuple):
    """What a run begins with."""

    params: Tree
    """Of version 0."""
    teachers: Mapping[str, Tree]


def compile_trainer(parts: Parts, mesh: Mesh) -> Compiled:
    """Ahead of time, for the trainer's mesh."""
    config, model = parts.config, parts.model
    shape = build.rl_shape(config)
    loss, optimizer = build.build_loss(config), build.build_optimizer(config)
    critic = build.build_critic(config)
    needs = build.build_advantage(config).needs
    options = build.step_options(config, model)
    step = build.compile_step(model, loss, optimizer, mesh, shape, critic, needs, options)
    served = config.sampler.param_dtype
    audit = build.compile_audit(model, mesh, shape, served, options)
    own = None
    if critic is not None and step.critic is not None:
        own = Critic(step.critic, critic.optimizer.updates_per_step, critic.loss.reduction)
    after, choices = step.after_push, options.choices
    return Compiled(step, Programs(step.step, after, audit, own, step.estimate, choices))


Prepared = tuple[Weights | None, Compiled]


async def prepare(parts: Parts, mesh: Mesh, stop: Stop, *, new: bool) -> Prepared | None:
    """What takes long before the first update: programs, and the first weights of a `new` run.

    None in every process of the world where one was asked to stop meanwhile. Cancel it only in a
    world of one: the others would wait in a collective for good.
    """
    deadline_s = parts.config.deadlines.start_s
    goes_on = partial(agreed, parts.world, lambda: stop.asked, deadline_s=deadline_s)
    dispatcher = Dispatcher("warm start")
    try:
        async with asyncio.TaskGroup() as starting:
            work = in_background(partial(compile_trainer, parts, mesh))
            compiling = starting.create_task(work)
            weights = await _first_weights(parts, mesh, dispatcher, goes_on) if new else None
            stopped = new and weights is None
            if stopped:
                compiling.cancel()
            parts.reporter.phase("compiling")
    finally:
        dispatcher.close()
    if stopped or not await goes_on():
        return None
    return weights, compiling.result()


async def _first_weights(
    parts: Parts, mesh: Mesh, dispatcher: Dispatcher, goes_on: GoesOn
) -> Weights | None:
    """The configured snapshot, or fresh weights after their warm start; and the teachers. None
    where it does not go on."""
    where = parts.config, parts.model, mesh
    params = await in_background(partial(first_params, *where))
    teachers = await in_background(partial(load_teachers, *where))
    params = await warm_start(
        parts.config,
        parts.model,
        params,
        parts.family,
        parts.renderer,
        dispatcher,
        parts.reporter,
        goes_on,
    )
    return None if params is None else Weights(params, teachers)


def weights_again(parts: Parts, mesh: Mesh) -> Weights:
    """Of a run whose version 0 is published. UserError where a teacher is no longer there."""
    store = SnapshotStore(parts.run_dir / "snapshots")
    dtype = parts.config.sampler.param_dtype
    params = store.load(0, build.abstract_params(parts.model, mesh, dtype))
    return Weights(params, load_teachers(parts.config, parts.model, mesh))


class Updates:
    """States of the trainer, from the first to the last."""

    def __init__(
        self, parts: Parts, mesh: Mesh, compiled: Compiled, dispatcher: Dispatcher
    ) -> None:
        self._parts, self._mesh, self._compiled = parts, mesh, compiled
        self._dispatcher = dispatcher

    async def begin(
        self, weights: Weights, push: Callable[[Tree, int], Awaitable[Pushed]]
    ) -> tuple[TrainState, Pushed]:
        """Version 0 is pushed, and the state is made of it."""
        initial = await push(weights.params, 0)
        return await self._fresh(weights._replace(params=initial.params)), initial

    async def newest(self, version: int) -> Tree:
        """A published version, in the trainer's arrangement."""
        dtype = self._parts.config.sampler.param_dtype
        abstract = build.abstract_params(self._parts.model, self._mesh, dtype)
        store = SnapshotStore(self._parts.run_dir / "snapshots")
        return await asyncio.to_thread(store.load, version, abstract)

    async def go_on(self, update: int) -> TrainState:
        """The state of the checkpoint of `update`; of none where it is 0."""
        if not update:
            again = await asyncio.to_thread(weights_again, self._parts, self._mesh)
            return await self._fresh(again)
        load = SnapshotStore(self._parts.run_dir / "checkpoints").load
        return await asyncio.to_thread(load, update, self._compiled.step.abstract)

    async def run(
        self, state: TrainState, initial: Pushed, hooks: Hooks, done: int
    ) -> tuple[TrainState, int]:
        """The updates after `done`, to the end or to a stop: the state and the last of them."""
        config = self._parts.config
        own = config.trainer
        return await train(
            state,
            self._compiled.programs,
            Schedule(own.updates, own.push_every, config.deadlines.step_s),
            hooks,
            self._dispatcher,
            done=done,
            advantage=build.build_advantage(config),
            reduction=build.build_loss(config).reduction,
            shape=build.rl_shape(config),
            auditor=Auditor(initial.params, initial.version),
            shuffle_seed=config.seed if config.control.rewards == "shuffled" else None,
            save_bad_batch=None
            if self._parts.world.process_id
            else self._parts.run_dir / "not_finite_batch.npz",
        )

    async def share(
        self,
        take: Take,
        update: int,
        *,
        asked: Callable[[], bool] = never,
        ask: Callable[[], object] = never,
    ) -> Taken | None:
        """What process 0 takes for `update`, in every process: see `shared_take`."""
        limit = self._parts.config.deadlines
        deadline = limit.start_s + limit.queue_get_s
        world = self._parts.world
        return await shared_take(world, take, update, deadline_s=deadline, asked=asked, ask=ask)

    def checkpoint_due(self, update: int) -> bool:
        """Whether one is written at the push of `update`, which is not the end."""
        own = self._parts.config
        pushes = -(-update // own.trainer.push_every)
        return pushes % own.checkpoint.every == 0 and update != own.trainer.updates

    async def copy(self, state: TrainState) -> TrainState:
        """What a checkpoint is written from while the state is donated."""
        return await self._dispatcher.run(copy_tree, state, label="copy for a checkpoint")

    async def describe_shared(self, tree: Tree) -> dict[str, Leaf]:
        """What process 0 puts into the manifest of what all processes write."""
        return await self._dispatcher.run(describe_shared, tree, label="digest")

    async def save_shared(self, store: SnapshotStore, version: int, tree: Tree) -> None:
        """Each process its part; process 0 has cleared the directory and seals it afterwards."""
        where = store.weights(version)
        await self._dispatcher.run(save_shared, where, tree, label=f"write {store.root.name}")

    async def _fresh(self, weights: Weights) -> TrainState:
        return await self._dispatcher.run(self._compiled.step.init, *weights, label="init")
