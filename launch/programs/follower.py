"""[H] A process of the trainer's world that is not process 0: the same programs, and no record.

What it trains on, and when it stops, comes from process 0 (`rl_jax.trainer.world`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import NamedTuple

import jax
import msgpack
from jax.sharding import Mesh

from launch.programs.base import Parts
from launch.programs.updates import Updates, Weights, prepare
from launch.resume import Resumption
from launch.stop import Stop
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.snapshots.publisher import served_copy
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import Hooks, Pushed, Taken
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.world import GO, STAY, World, hear, tell

STAY_S = 15.0
WRITE_S = 1800.0
"""Longest that process 0 may take to bring to the disk what was written before."""


class Start(NamedTuple):
    """Where all processes begin: what of the record matters to those that do not read it."""

    update: int
    """Of the checkpoint."""
    version: int
    """Newest at the checkpoint."""
    newest: int
    """On disk to the end; -1: not even version 0, a new run."""


NEW, OVER = Start(0, -1, -1), Start(-1, -1, -1)


async def announce(world: World, found: Resumption | None, *, over: bool = False) -> None:
    """Process 0 tells the others where to begin, or that the run is over."""
    start = Start(found.update, found.version, found.newest) if found else NEW
    await tell(world, msgpack.Packer().pack(OVER if over else start))


@asynccontextmanager
async def staying(world: World) -> AsyncIterator[None]:
    """While process 0 has something to wait for after the last update, the others hear of it."""

    async def remind() -> None:
        while True:
            await asyncio.sleep(STAY_S)
            await tell(world, STAY)

    reminding = asyncio.create_task(remind())
    try:
        yield
    finally:
        reminding.cancel()
        await asyncio.wait([reminding])


async def follow(parts: Parts, mesh: Mesh, stop: Stop) -> None:
    """To the end of the run, or to a stop. A stop of this process becomes one of process 0."""
    world, limit = parts.world, parts.config.deadlines
    start = Start(*msgpack.unpackb(await hear(world, deadline_s=limit.start_s)))
    if start == OVER:
        return
    prepared = await prepare(parts, mesh, stop, new=start == NEW)
    if prepared is None:
        return
    weights, compiled = prepared
    with closing(Dispatcher("trainer")) as dispatcher:
        updates = Updates(parts, mesh, compiled, dispatcher)
        await _Follower(parts, updates, dispatcher, stop, start).run(weights)
    # An evaluation may follow, which is process 0's.
    while await hear(world, deadline_s=WRITE_S) == STAY:
        pass


class _Follower:
    def __init__(
        self, parts: Parts, updates: Updates, dispatcher: Dispatcher, stop: Stop, start: Start
    ) -> None:
        self._parts, self._updates, self._dispatcher = parts, updates, dispatcher
        self._stop, self._start, self._newest = stop, start, start.version
        self._copy = partial(served_copy, dtype=parts.config.sampler.param_dtype)
        self._snapshots = SnapshotStore(parts.run_dir / "snapshots")
        self._checkpoints = SnapshotStore(parts.run_dir / "checkpoints")

    async def run(self, weights: Weights | None) -> None:
        if weights is not None:
            state, initial = await self._updates.begin(weights, self._push)
        else:
            version = self._start.newest
            initial = Pushed(version, await self._updates.newest(version))
            state = await self._updates.go_on(self._start.update)
        hooks = Hooks(self._take, _on_update, self._push, _settled, self._checkpoint)
        state, done = await self._updates.run(state, initial, hooks, self._start.update)
        await self._write(state, done)

    async def _take(self, update: int) -> Taken | None:
        return await self._updates.share(_from_process_0, update, asked=lambda: self._stop.asked)

    async def _push(self, params: Tree, update: int) -> Pushed:
        copy = await self._dispatcher.run(self._copy, params)
        await self._hear()
        await self._updates.describe_shared(copy)
        self._newest += 1
        if self._newest > self._start.newest:
            await self._updates.save_shared(self._snapshots, self._newest, copy)
        return Pushed(self._newest, copy)

    async def _checkpoint(self, state: TrainState, update: int) -> None:
        if self._updates.checkpoint_due(update):
            await self._write(state, update)

    async def _write(self, state: TrainState, update: int) -> None:
        if await self._hear() == GO:
            await self._updates.describe_shared(state)
            await self._updates.save_shared(self._checkpoints, update, state)

    async def _hear(self) -> bytes:
        """When process 0 has written what it had to before."""
        return await hear(self._parts.world, deadline_s=WRITE_S)


async def _from_process_0(update: int) -> Taken | None:
    raise AssertionError(f"process {jax.process_index()} has no queue to take update {update} from")


async def _on_update(*_: object) -> None: ...


def _settled(*_: object) -> None: ...
