"""Publishing: never an alias, the journal first, the pointer last."""

import asyncio
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rl_jax.arrays import Tree
from rl_jax.snapshots.manifest import Manifest
from rl_jax.snapshots.policies import keep_last
from rl_jax.snapshots.publisher import Publisher, copy_tree, reshard
from rl_jax.snapshots.store import SnapshotStore

DEVICES = np.array(jax.devices())
TRAINER = Mesh(DEVICES[:4].reshape(2, 2), ("data", "tensor"))
SAMPLER = Mesh(DEVICES[4:].reshape(2, 2), ("data", "tensor"))


def on(mesh: Mesh, *axes: str | None) -> Sharding:
    return NamedSharding(mesh, PartitionSpec(*axes))


PLACES = {
    "one device": SingleDeviceSharding(DEVICES[0]),
    "trainer split": on(TRAINER, "data", "tensor"),
    "trainer half": on(TRAINER, None, "tensor"),
    "trainer whole": on(TRAINER),
    "sampler split": on(SAMPLER, "data", "tensor"),
    "sampler whole": on(SAMPLER),
}
VALUE = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


def weights(place: str = "one device", value: float = 1.0) -> Tree:
    return {"w": copy_tree(jax.device_put(VALUE * np.float32(value), PLACES[place]))}


def buffers(tree: Tree) -> set[int]:
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return {s.data.unsafe_buffer_pointer() for s in shards}


@partial(jax.jit, donate_argnums=0)
def overwrite(tree: Tree) -> Tree:
    """The next update: writes into the buffers that it is given."""
    return jax.tree.map(lambda x: x * 0 - 1, tree)


@pytest.mark.parametrize("source", PLACES)
def test_a_copy_shares_no_buffer_and_outlives_donation(source: str) -> None:
    tree = weights(source)
    copied = copy_tree(tree)
    assert copied["w"].sharding == tree["w"].sharding
    assert not buffers(copied) & buffers(tree)
    jax.block_until_ready(overwrite(tree))
    assert tree["w"].is_deleted()
    assert (np.asarray(copied["w"]) == VALUE).all()


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_reshard_shares_no_buffer_whatever_the_places(source: str, target: str) -> None:
    tree = weights(source)
    moved = reshard(tree, {"w": PLACES[target]})
    assert moved["w"].sharding == PLACES[target]
    assert not buffers(moved) & buffers(tree)
    jax.block_until_ready(overwrite(tree))
    assert (np.asarray(moved["w"]) == VALUE).all()


def test_reshard_takes_one_sharding_for_the_whole_tree() -> None:
    moved = reshard({"a": weights(), "b": [weights()]}, PLACES["sampler whole"])
    assert {leaf.sharding for leaf in jax.tree.leaves(moved)} == {PLACES["sampler whole"]}


def test_publish_copies_before_it_returns(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    async def main() -> None:
        tree = weights("trainer split")
        waiting = Publisher(store).publish(tree, 0, 0)
        jax.block_until_ready(overwrite(tree))
        published = await asyncio.create_task(waiting)
        assert (np.asarray(published.params["w"]) == VALUE).all()
        assert published.digest == store.manifest(0).digest

    asyncio.run(main())
    assert (np.asarray(store.load(0, weights("sampler split"))["w"]) == VALUE).all()


def test_the_digest_is_journaled_before_anything_is_written(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    async def main() -> None:
        asked, answer = asyncio.Event(), asyncio.Event()
        seen = []

        async def on_digest(version: int, digest: str) -> None:
            seen.append((version, digest))
            asked.set()
            await answer.wait()

        task = asyncio.create_task(Publisher(store, on_digest).publish(weights(), 4, 16))
        await asked.wait()
        assert store.versions() == () and store.latest() is None
        answer.set()
        published = await task
        assert seen == [(4, published.digest)]
        assert store.latest() == 4 and store.manifest(4).step == 16

    asyncio.run(main())


def test_nothing_is_published_when_the_journal_fails(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    async def full(version: int, digest: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(Publisher(store, full).publish(weights(), 0, 0))
    assert store.versions() == () and store.latest() is None


def test_a_journal_that_never_answers_ends_at_the_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        never = asyncio.Event()
        publisher = Publisher(
            SnapshotStore(tmp_path), lambda version, digest: never.wait(), timeout=0.2
        )
        with pytest.raises(TimeoutError):
            await publisher.publish(weights(), 0, 0)

    asyncio.run(main())


def test_concurrent_publications_keep_their_order(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    async def main() -> None:
        order = []

        async def on_digest(version: int, digest: str) -> None:
            order.append((version, store.latest()))

        publisher = Publisher(store, on_digest)
        await asyncio.gather(*(publisher.publish(weights(value=v), v, v) for v in range(3)))
        assert order == [(0, None), (1, 0), (2, 1)]

    asyncio.run(main())


def test_lineage_names_the_version_before(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    async def main() -> None:
        publisher = Publisher(store, keep=keep_last(2))
        done = [await publisher.publish(weights(value=v), v, v) for v in (0, 2, 5)]
        assert store.manifest(2).parent == done[0].digest
        assert store.manifest(5).parent == done[1].digest

    asyncio.run(main())
    assert store.versions() == (2, 5)


def test_versions_only_go_up_but_a_restart_may_repeat(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    async def main() -> None:
        publisher = Publisher(store)
        first = await publisher.publish(weights(), 3, 3)
        with pytest.raises(ValueError, match="version 3 published after 3"):
            _ = publisher.publish(weights(), 3, 3)
        again = await Publisher(store).publish(weights(), 3, 3)
        assert again.digest == first.digest
        with pytest.raises(ValueError, match="exists with other weights"):
            await Publisher(store).publish(weights(value=2.0), 3, 3)

    asyncio.run(main())


def test_the_loop_runs_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        writing, ran = asyncio.Event(), asyncio.Event()
        real = SnapshotStore.commit

        def commit(store: SnapshotStore, manifest: Manifest) -> None:
            loop.call_soon_threadsafe(writing.set)
            asyncio.run_coroutine_threadsafe(ran.wait(), loop).result(timeout=20)
            real(store, manifest)

        monkeypatch.setattr(SnapshotStore, "commit", commit)
        task = asyncio.create_task(Publisher(SnapshotStore(tmp_path)).publish(weights(), 0, 0))
        await writing.wait()
        ran.set()  # the loop came here while the writer waited in its thread
        await task

    asyncio.run(main())
