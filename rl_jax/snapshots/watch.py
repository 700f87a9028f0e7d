"""[H] Following a store from another process: new versions are loaded and handed to a sampler."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rl_jax.arrays import Tree
from rl_jax.snapshots.store import SnapshotStore

Swap = Callable[[int, Tree], Awaitable[object]]
"""(version, parameters). Called in order of versions; a newer one may come while this waits."""


class Watcher:
    """Hands `swap` each version that `store`'s pointer comes to name above `version`, in the
    shardings and dtypes of `abstract`. Versions may be skipped.

    The pointer is read every `poll_s` seconds, and at once when `nudge` is called. `load_s` bounds
    the loading of one version.
    """

    def __init__(
        self,
        store: SnapshotStore,
        abstract: Tree,
        swap: Swap,
        *,
        version: int,
        poll_s: float = 0.2,
        load_s: float = 600.0,
    ) -> None:
        self.version = version
        """The newest that was handed over, or that the sampler began with."""
        self._store, self._abstract, self._swap = store, abstract, swap
        self._poll_s, self._load_s = poll_s, load_s
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Somebody heard of a new version. Call it on the loop."""
        self._nudged.set()

    async def run(self) -> None:
        """Until cancelled. A corrupt snapshot ends it with a ValueError that names the file, and so
        does a fault of `swap`, both in a group."""
        async with asyncio.TaskGroup() as swaps:
            while True:
                newest = await asyncio.to_thread(self._store.latest)
                if newest is not None and newest > self.version:
                    params = await self._load(newest)
                    if params is not None:
                        self.version = newest
                        # Beside this: a sampler that drains is told of newer versions meanwhile.
                        swaps.create_task(self._swapped(newest, params))
                        continue
                await self._changed()

    async def _swapped(self, version: int, params: Tree) -> None:
        await self._swap(version, params)

    async def _load(self, version: int) -> Tree | None:
        """None where the version is not there whole: not yet, or no more."""
        async with asyncio.timeout(self._load_s):
            try:
                return await asyncio.to_thread(self._store.load, version, self._abstract)
            except (ValueError, OSError):
                # Pruning takes the commit marker away first, so what still has it is corrupt.
                if version in await asyncio.to_thread(self._store.versions):
                    raise
                return None

    async def _changed(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                await self._nudged.wait()
        self._nudged.clear()
