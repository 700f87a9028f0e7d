"""[H] A push: the trainer makes a device copy and goes on; publication follows behind it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from launch.notices import Notices, Published, Settled
from launch.record import TrainerRecord
from launch.resume import Resumption
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.metrics.trace import PUSH
from rl_jax.snapshots.manifest import Leaf, build_manifest, tree_digest
from rl_jax.snapshots.publisher import Publisher, served_copy
from rl_jax.snapshots.shared import describe_shared, save_shared
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import Pushed
from rl_jax.trainer.world import ALONE, GO, World, tell

Deliver = Callable[[int, Tree], Awaitable[None]]
"""Hands a published version to the samplers of this process; returns when it is staged there."""


async def to_nobody(version: int, params: Tree) -> None:
    """For samplers in other processes: they watch the snapshot pointer."""


class Pusher:
    """Publishes ever newer versions, one publication at a time.

    Where the run goes on, versions after the checkpoint that are on record are made again and
    compared; one whose publication was cut short is published now. Versions are published in
    `dtype`. A world of several processes writes a version before its trainer goes on.
    """

    def __init__(
        self,
        store: SnapshotStore,
        record: TrainerRecord,
        dispatcher: Dispatcher,
        notices: Notices,
        background: asyncio.TaskGroup,
        *,
        resumption: Resumption | None = None,
        deliver: Deliver = to_nobody,
        dtype: str = "float32",
        world: World = ALONE,
    ) -> None:
        self._publisher = Publisher(store, on_digest=self._on_digest)
        self._record, self._dispatcher, self._notices = record, dispatcher, notices
        self._background, self._deliver = background, deliver
        self._copy = partial(served_copy, dtype=dtype)
        self._store, self._world = store, world
        self.newest = resumption.version if resumption else -1
        """The last version that was handed over, published or about to be."""
        self._known: Mapping[int, str] = resumption.digests if resumption else {}
        self._there = resumption.newest if resumption else -1
        self._updates: dict[int, int] = {}
        self._publication: asyncio.Task[None] | None = None
        self._staged = asyncio.Event()
        self._staged.set()

    async def push(self, params: Tree, update: int) -> Pushed:
        """Returns when the copy is made and no older publication is under way."""
        copy = await self._dispatcher.run(self._copy, params, label="copy for a push")
        await self.published()
        leaves = None
        if self._world.size > 1:
            await tell(self._world, GO)
            leaves = await self._dispatcher.run(describe_shared, copy, label="digest")
        self.newest += 1
        version = self.newest
        self._updates[version] = update
        if version <= self._there:
            of = partial(tree_digest, leaves) if leaves else partial(_digest, copy)
            self._compare(version, await asyncio.to_thread(of), update)
        else:
            if leaves is not None:
                await asyncio.to_thread(self._store.clear, version)
                where = self._store.weights(version)
                await self._dispatcher.run(save_shared, where, copy, label="write a version")
            self._staged = asyncio.Event()
            publication = self._publish(copy, leaves, version, update)
            self._publication = self._background.create_task(publication)
        return Pushed(version, copy)

    async def published(self) -> None:
        """Returns when nothing is being published."""
        if self._publication is not None:
            await self._publication

    def settled(self, prompts: tuple[int, ...]) -> None:
        """Tells the orchestrator, after the samplers were handed a version that is on its way."""
        if self._staged.is_set():
            self._notices.post(Settled(prompts))
        else:
            self._background.create_task(self._settled_later(self._staged, prompts))

    async def _settled_later(self, staged: asyncio.Event, prompts: tuple[int, ...]) -> None:
        await staged.wait()
        self._notices.post(Settled(prompts))

    async def _publish(
        self, copy: Tree, written: Mapping[str, Leaf] | None, version: int, update: int
    ) -> None:
        began = self._record.now()
        if written is None:
            await self._publisher.publish_copy(copy, version, update)
        else:
            await self._publisher.publish_written(written, version, update)
        self._record.version = version
        await self._deliver(version, copy)
        self._notices.post(Published(version))
        self._staged.set()
        self._record.trace.span("publication", PUSH, began, self._record.now(), version=version)

    async def _on_digest(self, version: int, digest: str) -> None:
        update = self._updates[version]
        if version in self._known:
            self._compare(version, digest, update)
        else:
            await self._record.on_digest(version, digest, update)

    def _compare(self, version: int, digest: str, update: int) -> None:
        if digest != self._known[version]:
            raise RuntimeError(
                f"update {update} done again after the checkpoint does not give "
                f"version {version} bit for bit; `rl-jax replay` names the first difference"
            )


def _digest(params: Tree) -> str:
    return build_manifest(params, 0, 0, "").digest
