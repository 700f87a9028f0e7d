"""A push: what the trainer waits for, what is told when, and versions that are made again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import jax.numpy as jnp
import pytest

from launch.notices import Notices, Published, Settled
from launch.push import Deliver, Pusher, to_nobody
from launch.record import TrainerRecord
from launch.resume import Resumption, resumption
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.replay import events
from rl_jax.replay.log import read
from rl_jax.snapshots.store import MARKER, SnapshotStore
from tests.fakes.parts import parts_in


@pytest.fixture
def dispatcher() -> Iterator[Dispatcher]:
    made = Dispatcher("trainer")
    yield made
    made.close()


def weights(value: float) -> Tree:
    return {"w": jnp.full((4,), value)}


class Pushing:
    """A pusher in a run's directory, with what it tells."""

    def __init__(self, pusher: Pusher, notices: Notices, store: SnapshotStore) -> None:
        self.pusher, self.notices, self.store = pusher, notices, store

    async def told(self) -> list[object]:
        return list(await self.notices.after(0)) if len(self.notices) else []


@asynccontextmanager
async def pushing(
    run_dir: Path,
    dispatcher: Dispatcher,
    deliver: Deliver = to_nobody,
    found: Resumption | None = None,
) -> AsyncIterator[Pushing]:
    record = TrainerRecord(parts_in(run_dir), found)
    notices, store = Notices(), SnapshotStore(run_dir / "snapshots")
    try:
        async with asyncio.TaskGroup() as background:
            pusher = Pusher(
                store, record, dispatcher, notices, background, resumption=found, deliver=deliver
            )
            yield Pushing(pusher, notices, store)
    finally:
        await record.close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


def published(run_dir: Path) -> list[tuple[int, int]]:
    """(version, step) of the journal."""
    told = (entry.event for entry in read(run_dir, "trainer"))
    return [(e.version, e.step) for e in told if isinstance(e, events.VersionPublished)]


def test_a_push_returns_before_its_version_is_out(tmp_path: Path, dispatcher: Dispatcher) -> None:
    """And what is settled by its update is told after the samplers were handed the version."""
    handed, release = asyncio.Event(), asyncio.Event()

    async def slow(version: int, params: Tree) -> None:
        handed.set()
        await release.wait()

    async def main() -> None:
        async with pushing(tmp_path, dispatcher, slow) as own:
            pushed = await own.pusher.push(weights(1.0), 0)
            assert (pushed.version, float(pushed.params["w"][0])) == (0, 1.0)
            own.pusher.settled((7, 8))
            await handed.wait()
            assert own.store.versions() == (0,) and own.store.latest() == 0
            assert await own.told() == []
            release.set()
            await own.pusher.published()
            while len(own.notices) < 2:
                await own.notices.after(len(own.notices))
            assert await own.told() == [Published(0), Settled((7, 8))]
            own.pusher.settled((9,))
            assert (await own.told())[2:] == [Settled((9,))]

    run(main)
    assert published(tmp_path) == [(0, 0)]


def test_one_publication_at_a_time(tmp_path: Path, dispatcher: Dispatcher) -> None:
    release = asyncio.Event()

    async def slow(version: int, params: Tree) -> None:
        await release.wait()

    async def main() -> None:
        async with pushing(tmp_path, dispatcher, slow) as own:
            await own.pusher.push(weights(0.0), 0)
            second = asyncio.ensure_future(own.pusher.push(weights(1.0), 2))
            done, _ = await asyncio.wait({second}, timeout=0.05)
            assert not done
            release.set()
            assert (await second).version == 1
            await own.pusher.published()
            assert await own.told() == [Published(0), Published(1)]

    run(main)
    assert published(tmp_path) == [(0, 0), (1, 2)]


async def three_versions(run_dir: Path, dispatcher: Dispatcher) -> None:
    async with pushing(run_dir, dispatcher) as own:
        for version in range(3):
            await own.pusher.push(weights(float(version)), version)
            await own.pusher.published()


@pytest.mark.parametrize("cut_short", [False, True])
def test_versions_on_record_are_made_again(
    tmp_path: Path, dispatcher: Dispatcher, cut_short: bool
) -> None:
    """None is told or journaled twice; one whose snapshot was never committed is published."""

    async def main() -> None:
        await three_versions(tmp_path, dispatcher)
        if cut_short:
            (tmp_path / "snapshots" / "2" / MARKER).unlink()
        found = resumption(tmp_path)
        assert found is not None and found.newest == (1 if cut_short else 2)
        async with pushing(tmp_path, dispatcher, found=found) as own:
            for version in (1, 2, 3):
                pushed = await own.pusher.push(weights(float(version)), version)
                assert pushed.version == version
            await own.pusher.published()
            again = [Published(2), Published(3)] if cut_short else [Published(3)]
            assert await own.told() == again
            assert own.store.versions() == (0, 1, 2, 3)

    run(main)
    assert published(tmp_path) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_other_weights_under_a_version_on_record_are_an_error(
    tmp_path: Path, dispatcher: Dispatcher
) -> None:
    async def main() -> None:
        await three_versions(tmp_path, dispatcher)
        async with pushing(tmp_path, dispatcher, found=resumption(tmp_path)) as own:
            with pytest.raises(RuntimeError, match=r"update 1 done again .* version 1 bit for bit"):
                await own.pusher.push(weights(1.5), 1)

    run(main)
