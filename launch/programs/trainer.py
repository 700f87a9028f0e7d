"""[H] The trainer's part of a run: warm start, version 0, updates, checkpoints, the last version.

It takes groups from a queue of its own, which others fill, and tells through notices what becomes
of them.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from launch import build
from launch.background import in_background
from launch.notices import Dropped, Ended, Notices, Published
from launch.programs.base import Parts
from launch.push import Deliver, Pusher, to_nobody
from launch.record import TrainerRecord
from launch.resume import Resumption
from launch.stop import Stop
from launch.warm_start import first_params, load_teachers, warm_start
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.queues.memory import MemoryQueue
from rl_jax.replay import events
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.policies import keep_last
from rl_jax.snapshots.publisher import copy_tree
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import Auditor, Critic, Hooks, Programs, Pushed, Schedule, Taken, train
from rl_jax.trainer.state import TrainState
from rl_jax.trajectories.codec import encode_group
from rl_jax.trajectories.types import Group


class Compiled(NamedTuple):
    """The trainer's programs and what makes a first state."""

    step: build.StepProgram
    programs: Programs


def compile_trainer(parts: Parts, meshes: build.Meshes) -> Compiled:
    """Ahead of time, for the trainer's mesh."""
    config, model = parts.config, parts.model
    shape = build.rl_shape(config)
    loss, optimizer = build.build_loss(config), build.build_optimizer(config)
    critic = build.build_critic(config)
    needs = build.build_advantage(config).needs
    options = build.step_options(config, model)
    step = build.compile_step(model, loss, optimizer, meshes.trainer, shape, critic, needs, options)
    served = config.sampler.param_dtype
    audit = build.compile_audit(model, meshes.trainer, shape, served, options)
    own = None
    if critic is not None and step.critic is not None:
        own = Critic(step.critic, critic.optimizer.updates_per_step, critic.loss.reduction)
    after, choices = step.after_push, options.choices
    return Compiled(step, Programs(step.step, after, audit, own, step.estimate, choices))


class Weights(NamedTuple):
    """What a run begins with."""

    params: Tree
    """Of version 0."""
    teachers: Mapping[str, Tree]


def weights_again(parts: Parts, meshes: build.Meshes) -> Weights:
    """Of a run whose version 0 is published. UserError where a teacher is no longer there."""
    store = SnapshotStore(parts.run_dir / "snapshots")
    dtype = parts.config.sampler.param_dtype
    params = store.load(0, build.abstract_params(parts.model, meshes.trainer, dtype))
    return Weights(params, load_teachers(parts.config, parts.model, meshes.trainer))


async def prepare(
    parts: Parts, meshes: build.Meshes, found: Resumption | None
) -> tuple[Weights | None, Compiled]:
    """What takes long before the first update: the first weights, None where the run goes on, and
    programs."""
    dispatcher = Dispatcher("warm start")
    try:
        async with asyncio.TaskGroup() as starting:
            work = in_background(partial(compile_trainer, parts, meshes))
            compiling = starting.create_task(work)
            weights = None if found else await _first_weights(parts, meshes, dispatcher)
            parts.reporter.phase("compiling")
    finally:
        dispatcher.close()
    return weights, compiling.result()


async def _first_weights(parts: Parts, meshes: build.Meshes, dispatcher: Dispatcher) -> Weights:
    """The configured snapshot, or fresh weights after their warm start; and the teachers."""
    where = parts.config, parts.model, meshes.trainer
    params = await in_background(partial(first_params, *where))
    teachers = await in_background(partial(load_teachers, *where))
    params = await warm_start(
        parts.config, parts.model, params, parts.family, parts.renderer, dispatcher, parts.reporter
    )
    return Weights(params, teachers)


class Trainer:
    """One run, or one part of it between a resumption and a stop.

    Others fill `queue`. `deliver` hands versions to the samplers of this process, and
    `oldest_in_flight` is what a policy that waits for stragglers asks.
    """

    def __init__(
        self,
        parts: Parts,
        meshes: build.Meshes,
        compiled: Compiled,
        record: TrainerRecord,
        notices: Notices,
        dispatcher: Dispatcher,
        stop: Stop,
        background: asyncio.TaskGroup,
        resumption: Resumption | None,
        *,
        deliver: Deliver = to_nobody,
        oldest_in_flight: Callable[[], Iterable[int]],
    ) -> None:
        self._parts, self._meshes, self._compiled, self._record = parts, meshes, compiled, record
        self._notices, self._dispatcher, self._stop = notices, dispatcher, stop
        self._background, self._resumption, self._deliver = background, resumption, deliver
        self._admit = build.build_admit(parts.config, oldest_in_flight)
        self._snapshots = SnapshotStore(parts.run_dir / "snapshots")
        self._checkpoints = SnapshotStore(parts.run_dir / "checkpoints")
        self._logged: Mapping[int, Taken] = resumption.logged if resumption else {}
        self._pusher = Pusher(
            self._snapshots, record, dispatcher, notices, background,
            resumption=resumption,
            deliver=deliver,
            dtype=parts.config.sampler.param_dtype,
        )  # fmt: skip
        self._saving: asyncio.Task[None] | None = None
        self._began = False
        self.queue = self._build_queue()

    @property
    def done(self) -> int:
        """The last update that is done."""
        return self._record.update

    async def run(self, weights: Weights | None) -> bool:
        """Updates from the first `weights`, or from the resumption: to the end, or to a
        stop with a checkpoint. True where all are done."""
        if self._resumption is None:
            assert weights is not None, "a new run begins with weights"
            done, (state, initial) = 0, await self._begin(weights)
        else:
            done, (state, initial) = self._resumption.update, await self._go_on(self._resumption)
        config = self._parts.config
        own = config.trainer
        state, done = await train(
            state,
            self._compiled.programs,
            Schedule(own.updates, own.push_every, config.deadlines.step_s),
            self._hooks(),
            self._dispatcher,
            done=done,
            advantage=build.build_advantage(config),
            reduction=build.build_loss(config).reduction,
            shape=build.rl_shape(config),
            auditor=Auditor(initial.params, initial.version),
            shuffle_seed=config.seed if config.control.rewards == "shuffled" else None,
            save_bad_batch=self._parts.run_dir / "not_finite_batch.npz",
        )
        await self._checkpoint(state, done)
        if self._saving is not None:
            await self._saving
        finished = done >= own.updates
        self._notices.post(Ended(self._record.version, finished))
        return finished

    def _hooks(self) -> Hooks:
        return Hooks(
            self._take,
            self._record.on_update,
            self._pusher.push,
            lambda update, groups: self._pusher.settled(tuple(g.prompt for g in groups)),
            self._checkpoint_at_push,
        )

    def _build_queue(self) -> MemoryQueue:
        """It holds whatever may be outstanding."""
        own = self._parts.config.trainer
        outstanding = build.build_limits(self._parts.config).outstanding

        def dropped(group: Group, reason: str) -> None:
            self._record.on_drop(group, reason)
            self._notices.post(Dropped(group.prompt))

        record = self._record
        capacity = max(outstanding, own.groups)
        queue = MemoryQueue(capacity, lambda: record.version, record.on_put, dropped)
        if self._resumption is not None:
            queued = [encode_group(group) for group in self._resumption.queued]
            queue.set_state({"unacked": [], "queued": queued})
        return queue

    async def _begin(self, weights: Weights) -> tuple[TrainState, Pushed]:
        """Version 0 is published and with the samplers; the state is fresh."""
        initial = await self._pusher.push(weights.params, 0)
        await self._pusher.published()
        return await self._fresh(weights._replace(params=initial.params)), initial

    async def _go_on(self, where: Resumption) -> tuple[TrainState, Pushed]:
        """The state of the checkpoint; the newest version is with the samplers."""
        dtype = self._parts.config.sampler.param_dtype
        abstract = build.abstract_params(self._parts.model, self._meshes.trainer, dtype)
        newest = await asyncio.to_thread(self._snapshots.load, where.newest, abstract)
        # A kill may have left it committed and not pointed to.
        await asyncio.to_thread(self._snapshots.point, where.newest)
        await self._deliver(where.newest, newest)
        self._notices.post(Published(where.newest))
        if where.update:
            load, shape = self._checkpoints.load, self._compiled.step.abstract
            state = await asyncio.to_thread(load, where.update, shape)
        else:
            again = await asyncio.to_thread(weights_again, self._parts, self._meshes)
            state = await self._fresh(again)
        return state, Pushed(where.newest, newest)

    async def _fresh(self, weights: Weights) -> TrainState:
        return await self._dispatcher.run(self._compiled.step.init, *weights, label="init")

    async def _take(self, update: int) -> Taken | None:
        """A batch that an earlier part of the run had on record, else the queue's next."""
        if self._stop.asked:
            return None
        if (logged := self._logged.get(update)) is not None:
            self._begin_phase(update)
            return logged
        if self._parts.config.staleness.when_stale == "wait":
            # Or who is at the edge would be judged by a version that is about to be left.
            await self._pusher.published()
        taken = await self._stop.unless(self._next(update))
        if taken is not None:
            self._begin_phase(update)
            await self._record.on_batch(update, taken.groups, taken.published_version)
        return taken

    async def _next(self, update: int) -> Taken:
        """The queue's next batch and the version that it was admitted under."""
        config = self._parts.config
        groups = await self.queue.get(
            config.trainer.groups, self._admit, step=update, timeout=config.deadlines.queue_get_s
        )
        groups.sort(key=lambda group: (group.task, group.prompt))
        return Taken(groups, self._record.version)

    def _begin_phase(self, update: int) -> None:
        """Before the first batch others may be in a phase of theirs: an evaluation."""
        if not self._began:
            self._began = True
            updates = self._parts.config.trainer.updates
            self._parts.reporter.phase("asynchronous RL", updates, update - 1)

    async def _checkpoint_at_push(self, state: TrainState, update: int) -> None:
        own = self._parts.config
        pushes = -(-update // own.trainer.push_every)
        last = update == own.trainer.updates
        if pushes % own.checkpoint.every == 0 and not last:
            await self._checkpoint(state, update)

    async def _checkpoint(self, state: TrainState, update: int) -> None:
        """Returns when the state is copied; it is written in the background, one at a time."""
        copy = await self._dispatcher.run(copy_tree, state, label="copy for a checkpoint")
        if self._saving is not None:
            await self._saving
        saving = self._save(copy, update, self._pusher.newest)
        self._saving = self._background.create_task(saving)

    async def _save(self, state: TrainState, update: int, version: int) -> None:
        # A checkpoint names a version that is on disk.
        await self._pusher.published()
        await asyncio.to_thread(self._write, state, update)
        await self._record.log.append(events.CheckpointSaved(update, version))
        keep = keep_last(self._parts.config.checkpoint.keep)
        await asyncio.to_thread(self._checkpoints.prune, keep)
        self.queue.ack(update)
        await self._record.trajectories.rotate()

    def _write(self, state: TrainState, update: int) -> None:
        manifest = build_manifest(state, update, update, "")
        self._checkpoints.write(manifest, state)
        self._checkpoints.commit(manifest)
        self._checkpoints.point(update)
