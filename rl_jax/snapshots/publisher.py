"""[H] Publishing weights: copy, digest, journal, write, commit, point; and reshard in process.

Knows neither samplers nor the trainer's state: it is handed a parameter tree.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl_jax.arrays import Tree
from rl_jax.precision import kept_in
from rl_jax.snapshots.manifest import Leaf, Manifest, build_manifest, tree_digest
from rl_jax.snapshots.policies import Keep, keep_all
from rl_jax.snapshots.store import SnapshotStore

OnDigest = Callable[[int, str], Awaitable[object]]
"""(version, digest): makes the pair durable; the pointer moves only after it returned."""


class Published(NamedTuple):
    version: int
    digest: str
    params: Tree
    """The publisher's own copy; nobody donates it."""


@jax.jit
def copy_tree(tree: Tree) -> Tree:
    """Fresh buffers, same shardings. (`device_put` may hand back the buffers it was given.)"""
    return jax.tree.map(jnp.copy, tree)


@partial(jax.jit, static_argnames="dtype")
def served_copy(params: Tree, dtype: str) -> Tree:
    """`copy_tree` of what is published of parameters: matrices rounded to `dtype`, which samplers
    hold, snapshots store and digests are of."""
    return jax.tree.map(jnp.copy, kept_in(params, dtype))


def reshard(tree: Tree, shardings: Tree) -> Tree:
    """The tree on other shardings, device to device, sharing no buffer with `tree`.

    `shardings` is one sharding or a tree of them.
    """
    moved = jax.device_put(tree, shardings)
    # device_put reuses a shard that already lies on its device, even told may_alias=False.
    before, structure = jax.tree.flatten(tree)
    after = jax.tree.leaves(moved)
    fresh = [
        copy_tree(new) if new.devices() & old.devices() else new
        for old, new in zip(before, after, strict=True)
    ]
    return jax.tree.unflatten(structure, fresh)


class Publisher:
    """Publishes ever newer versions into a store, one at a time.

    `timeout` bounds one publication, in seconds.
    """

    def __init__(
        self,
        store: SnapshotStore,
        on_digest: OnDigest | None = None,
        keep: Keep = keep_all,
        timeout: float = 600.0,
    ) -> None:
        self._store = store
        self._on_digest = on_digest
        self._keep = keep
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._newest = -1

    def publish(self, params: Tree, version: int, step: int) -> Coroutine[Any, Any, Published]:
        """Copies `params` before it returns, so they may be donated next; await the rest.

        A ValueError where `version` is not above the last one published here, or exists with
        other weights. Publishing the same weights again, after a restart, is allowed.
        """
        return self.publish_copy(copy_tree(params), version, step)

    def publish_copy(self, params: Tree, version: int, step: int) -> Coroutine[Any, Any, Published]:
        """As `publish`, of a tree that nobody else will donate: no copy is made."""
        self._advance(version)
        return self._publish(params, version, step)

    def _advance(self, version: int) -> None:
        if version <= self._newest:
            raise ValueError(f"version {version} published after {self._newest}")
        self._newest = version

    async def publish_written(self, leaves: Mapping[str, Leaf], version: int, step: int) -> str:
        """As `publish`, of weights that are in the store already, not sealed; the digest."""
        self._advance(version)
        async with asyncio.timeout(self._timeout), self._turn:
            manifest = await asyncio.to_thread(self._manifest, leaves, version, step)
            if self._on_digest is not None:
                await self._on_digest(version, manifest.digest)
            await asyncio.to_thread(self._store.seal, manifest)
            await asyncio.to_thread(self._show, manifest)
        return manifest.digest

    async def _publish(self, params: Tree, version: int, step: int) -> Published:
        async with asyncio.timeout(self._timeout), self._turn:
            manifest = await asyncio.to_thread(self._describe, params, version, step)
            if self._on_digest is not None:
                await self._on_digest(version, manifest.digest)
            await asyncio.to_thread(self._store_away, manifest, params)
        return Published(version, manifest.digest, params)

    def _describe(self, params: Tree, version: int, step: int) -> Manifest:
        return build_manifest(params, version, step, self._parent(version))

    def _manifest(self, leaves: Mapping[str, Leaf], version: int, step: int) -> Manifest:
        return Manifest(version, step, tree_digest(leaves), self._parent(version), leaves)

    def _parent(self, version: int) -> str:
        older = [v for v in self._store.versions() if v < version]
        return self._store.manifest(older[-1]).digest if older else ""

    def _store_away(self, manifest: Manifest, params: Tree) -> None:
        self._store.write(manifest, params)
        self._show(manifest)

    def _show(self, manifest: Manifest) -> None:
        self._store.commit(manifest)
        self._store.point(manifest.version)
        self._store.prune(self._keep)
