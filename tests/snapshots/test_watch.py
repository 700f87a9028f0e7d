"""Following a store: what is handed over, in which order, and what is no error."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import Tree
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.policies import keep_last
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.snapshots.watch import Watcher
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, prompt, request
from tests.fakes.engine import run as run_engine

NEVER = 3600.0
"""Between two polls, where a nudge is what counts."""


def run[T](main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def whole() -> T:
        async with asyncio.timeout(30):
            return await main()

    return asyncio.run(whole())


def tree(version: int) -> Tree:
    return {"w": jnp.full(4, version, jnp.float32)}


def publish(store: SnapshotStore, version: int, params: Tree | None = None) -> None:
    params = tree(version) if params is None else params
    manifest = build_manifest(params, version, 0, "")
    store.write(manifest, params)
    store.commit(manifest)
    store.point(version)


class Sampler:
    """Takes what it is given, and remembers."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.next = asyncio.Event()

    async def swap(self, version: int, params: Tree) -> None:
        assert np.asarray(params["w"]).tolist() == [version] * 4
        self.given.append(version)
        self.next.set()

    async def has(self, *versions: int) -> None:
        while self.given != list(versions):
            await self.next.wait()
            self.next.clear()


class Seen(SnapshotStore):
    """A store that does `after` when its pointer has been read, on the watcher's thread."""

    after: Callable[[int | None], object] = staticmethod(lambda version: None)

    def latest(self) -> int | None:
        found = super().latest()
        self.after(found)
        return found


@pytest.fixture
def store(tmp_path: Path) -> Seen:
    return Seen(tmp_path / "snapshots")


@asynccontextmanager
async def watched(watcher: Watcher) -> AsyncIterator[None]:
    """A fault of the watcher ends the test at once."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watcher.run())
        yield
        task.cancel()


def doing(store: Seen, after: Callable[[int | None], object]) -> None:
    object.__setattr__(store, "after", after)


def test_versions_are_handed_over_when_somebody_says_so(store: Seen) -> None:
    async def main() -> None:
        sampler = Sampler()
        watcher = Watcher(store, tree(0), sampler.swap, version=0, poll_s=NEVER)
        async with watched(watcher):
            for version in (1, 2):
                publish(store, version)
                watcher.nudge()
                await sampler.has(*range(1, version + 1))
            assert watcher.version == 2

    run(main)


def test_versions_are_found_by_polling(store: Seen) -> None:
    async def main() -> None:
        sampler = Sampler()
        watcher = Watcher(store, tree(0), sampler.swap, version=0, poll_s=0.01)
        async with watched(watcher):
            publish(store, 1)
            await sampler.has(1)

    run(main)


def test_versions_may_be_skipped_and_what_is_old_is_left_alone(store: Seen) -> None:
    async def main() -> None:
        sampler = Sampler()
        for version in range(4):
            publish(store, version)
        watcher = Watcher(store, tree(0), sampler.swap, version=1, poll_s=NEVER)
        async with watched(watcher):
            await sampler.has(3)
            late = Watcher(store, tree(0), sampler.swap, version=3, poll_s=NEVER)
            read = asyncio.Event()
            loop = asyncio.get_running_loop()
            doing(store, lambda version: loop.call_soon_threadsafe(read.set))
            async with watched(late):
                await read.wait()
                read.clear()
                late.nudge()
                await read.wait()
            assert sampler.given == [3]

    run(main)


def test_a_nudge_while_a_version_is_read_is_not_lost(store: Seen) -> None:
    async def main() -> None:
        sampler = Sampler()
        watcher = Watcher(store, tree(0), sampler.swap, version=0, poll_s=NEVER)
        loop = asyncio.get_running_loop()

        def meanwhile(version: int | None) -> None:
            if version is None:
                publish(SnapshotStore(store.root), 1)
                loop.call_soon_threadsafe(watcher.nudge)

        doing(store, meanwhile)
        async with watched(watcher):
            await sampler.has(1)

    run(main)


def test_a_newer_version_is_handed_over_while_an_older_one_waits(store: Seen) -> None:
    """A sampler that drains keeps `swap` waiting."""

    async def main() -> None:
        given: list[int] = []
        both = asyncio.Event()

        async def swap(version: int, params: Tree) -> None:
            given.append(version)
            if version == 2:
                both.set()
            publish(store, 2)
            watcher.nudge()
            await both.wait()

        publish(store, 1)
        watcher = Watcher(store, tree(0), swap, version=0, poll_s=NEVER)
        async with watched(watcher):
            await both.wait()
            assert given == [1, 2]

    run(main)


def test_a_version_pruned_before_it_was_loaded_is_passed_over(store: Seen) -> None:
    async def main() -> None:
        sampler = Sampler()
        publish(store, 1)

        def overtaken(version: int | None) -> None:
            if version == 1:
                other = SnapshotStore(store.root)
                publish(other, 2)
                assert other.prune(keep_last(1)) == (1,)
                loop.call_soon_threadsafe(watcher.nudge)

        loop = asyncio.get_running_loop()
        doing(store, overtaken)
        watcher = Watcher(store, tree(0), sampler.swap, version=0, poll_s=NEVER)
        async with watched(watcher):
            await sampler.has(2)

    run(main)


def test_a_version_that_is_not_there_whole_is_tried_again(store: Seen) -> None:
    """The pointer came first, as on a file system that shows files in an order of its own."""

    async def main() -> None:
        sampler = Sampler()
        publish(store, 1)
        marker = store.root / "1" / "COMMITTED"
        text = marker.read_text()
        marker.unlink()
        reads: list[int | None] = []

        def later(version: int | None) -> None:
            reads.append(version)
            if len(reads) == 2:
                marker.write_text(text)
            loop.call_soon_threadsafe(watcher.nudge)

        loop = asyncio.get_running_loop()
        doing(store, later)
        watcher = Watcher(store, tree(0), sampler.swap, version=0, poll_s=NEVER)
        async with watched(watcher):
            await sampler.has(1)
            assert len(reads) >= 2

    run(main)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda at: (at / "1" / "manifest.json").write_text("{}"), "manifest.json is missing or"),
        (lambda at: shutil.rmtree(at / "1" / "weights"), "is missing or not as COMMITTED has it"),
        (lambda at: (at / "latest").write_text("one"), "'one' is not a version number"),
    ],
)
def test_a_corrupt_version_ends_it(
    store: Seen, damage: Callable[[Path], object], said: str
) -> None:
    async def main() -> None:
        sampler = Sampler()
        publish(store, 1)
        damage(store.root)
        watcher = Watcher(store, tree(0), sampler.swap, version=0, poll_s=NEVER)
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match=said)):
            await watcher.run()
        assert sampler.given == []

    run(main)


def test_weights_of_another_tree_end_it(store: Seen) -> None:
    async def main() -> None:
        publish(store, 1, {"w": jnp.ones(5)})
        watcher = Watcher(store, tree(0), Sampler().swap, version=0, poll_s=NEVER)
        with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match=r"w has shape \[5\]")):
            await watcher.run()

    run(main)


def test_a_fault_of_the_sampler_ends_it(store: Seen) -> None:
    async def main() -> None:
        async def swap(version: int, params: Tree) -> None:
            raise RuntimeError("the sampler has stopped")

        publish(store, 1)
        watcher = Watcher(store, tree(0), swap, version=0, poll_s=NEVER)
        with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="has stopped")):
            await watcher.run()

    run(main)


def test_loading_has_a_deadline(store: Seen) -> None:
    async def main() -> None:
        publish(store, 1)
        watcher = Watcher(store, tree(0), Sampler().swap, version=0, poll_s=NEVER, load_s=0)
        with pytest.RaisesGroup(TimeoutError):
            await watcher.run()

    run(main)


def test_an_engine_samples_what_the_store_names(store: Seen) -> None:
    """Loaded into the engine's own shardings, and swapped without a stop."""

    def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    async def main(engine: Engine, _: Stepped) -> None:
        async def swap(version: int, params: Tree) -> None:
            await engine.swap(Weights(version, params))
            swapped.set()

        swapped = asyncio.Event()
        shapes = jax.tree.map(abstract, tiny.params())
        watcher = Watcher(store, shapes, swap, version=0, poll_s=NEVER)
        async with watched(watcher):
            publish(store, 3, tiny.params(seed=3))
            watcher.nudge()
            await swapped.wait()
            (given,) = await ask(engine, 1, request(prompt(1, 20), 10))
            assert given.versions == (3,) * 10
            scores = tiny.scored(tiny.params(seed=3), [*prompt(1, 20), *given.tokens])[20:]
            np.testing.assert_allclose(np.array(given.logprobs), scores, atol=1e-5)

    run_engine(main)
