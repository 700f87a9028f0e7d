"""[H] The trainer's part of a run: warm start, version 0, updates, checkpoints, the last version.

It takes groups from a queue of its own, which others fill, and tells through notices what becomes
of them.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from launch import build
from launch.notices import Dropped, Ended, Notices, Published
from launch.programs.base import Parts
from launch.programs.updates import Updates, Weights
from launch.push import Deliver, Pusher, to_nobody
from launch.record import TrainerRecord
from launch.resume import Resumption
from launch.stop import Stop
from rl_jax.dispatch import Dispatcher
from rl_jax.queues.memory import MemoryQueue
from rl_jax.replay import events
from rl_jax.snapshots.manifest import Leaf, Manifest, build_manifest, tree_digest
from rl_jax.snapshots.policies import keep_last
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import Hooks, Pushed, Taken
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.world import GO, SKIP, tell
from rl_jax.trajectories.codec import encode_group
from rl_jax.trajectories.types import Group


class Trainer:
    """One run, or one part of it between a resumption and a stop.

    Others fill `queue`. `deliver` hands versions to the samplers of this process, and
    `oldest_in_flight` is what a policy that waits for stragglers asks.
    """

    def __init__(
        self,
        parts: Parts,
        updates: Updates,
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
        self._parts, self._updates, self._record = parts, updates, record
        self._notices, self._stop = notices, stop
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
            world=parts.world,
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
            state, initial = await self._updates.begin(weights, self._pusher.push)
            await self._pusher.published()
            done = 0
        else:
            done, (state, initial) = self._resumption.update, await self._go_on(self._resumption)
        state, done = await self._updates.run(state, initial, self._hooks(), done)
        await self._checkpoint(state, done)
        await self._saved()
        finished = done >= self._parts.config.trainer.updates
        self._notices.post(Ended(self._record.version, finished))
        return finished

    def _hooks(self) -> Hooks:
        return Hooks(
            self._share,
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

    async def _go_on(self, where: Resumption) -> tuple[TrainState, Pushed]:
        """The state of the checkpoint; the newest version is with the samplers."""
        newest = await self._updates.newest(where.newest)
        # A kill may have left it committed and not pointed to.
        await asyncio.to_thread(self._snapshots.point, where.newest)
        await self._deliver(where.newest, newest)
        self._notices.post(Published(where.newest))
        return await self._updates.go_on(where.update), Pushed(where.newest, newest)

    async def _share(self, update: int) -> Taken | None:
        """What this process takes, in all processes of the world."""
        return await self._updates.share(self._take, update, ask=self._stop.ask)

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
        if self._updates.checkpoint_due(update):
            await self._checkpoint(state, update)

    async def _checkpoint(self, state: TrainState, update: int) -> None:
        """Returns when the state is copied; it is written in the background, one at a time. A
        world of several processes writes it first, unless it is there."""
        if self._parts.world.size > 1:
            return await self._checkpoint_shared(state, update)
        copy = await self._updates.copy(state)
        await self._saved()
        self._save_later(partial(self._write, copy, update), update)

    async def _checkpoint_shared(self, state: TrainState, update: int) -> None:
        await self._saved()
        there = update in await asyncio.to_thread(self._checkpoints.versions)
        await tell(self._parts.world, SKIP if there else GO)
        if not there:
            leaves = await self._updates.describe_shared(state)
            await asyncio.to_thread(self._checkpoints.clear, update)
            await self._updates.save_shared(self._checkpoints, update, state)
            self._save_later(partial(self._seal, leaves, update), update)

    async def _saved(self) -> None:
        if self._saving is not None:
            await self._saving

    def _save_later(self, write: Callable[[], None], update: int) -> None:
        saving = self._save(write, update, self._pusher.newest)
        self._saving = self._background.create_task(saving)

    async def _save(self, write: Callable[[], None], update: int, version: int) -> None:
        # A checkpoint names a version that is on disk.
        await self._pusher.published()
        await asyncio.to_thread(write)
        await self._record.log.append(events.CheckpointSaved(update, version))
        keep = keep_last(self._parts.config.checkpoint.keep)
        await asyncio.to_thread(self._checkpoints.prune, keep)
        self.queue.ack(update)
        await self._record.trajectories.rotate()

    def _write(self, state: TrainState, update: int) -> None:
        manifest = build_manifest(state, update, update, "")
        self._checkpoints.write(manifest, state)
        self._show(manifest)

    def _seal(self, leaves: Mapping[str, Leaf], update: int) -> None:
        manifest = Manifest(update, update, tree_digest(leaves), "", leaves)
        self._checkpoints.seal(manifest)
        self._show(manifest)

    def _show(self, manifest: Manifest) -> None:
        self._checkpoints.commit(manifest)
        self._checkpoints.point(manifest.version)
