"""Trainer and orchestrator over a real socket: order, reconnection, where a run goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from launch import link as linking
from launch.link import Link, LinkServer
from launch.notices import Dropped, Ended, Notice, Notices, Published, Settled
from launch.resume import Rollouts
from rl_jax.orchestrator.state import Resume
from rl_jax.trajectories.types import RolloutKey
from rl_jax.wire.connection import ConnectionLost
from tests.fakes.ticks import Ticks

TOKEN = "secret"
GOES_ON = Rollouts(
    Resume(9, ((3, 1), (4, 2)), ((5, 0), (6, 2)), started=8, published=4),
    (RolloutKey("t", 3, 0), RolloutKey("t", 4, 1, 1)),
    frozenset({"before"}),
)


async def new() -> None:
    return None


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


def serve(server: LinkServer, path: Path):
    return server.serve(f"unix:{path}/l", TOKEN, Ticks())


async def read(link: Link, into: list[Notice]) -> None:
    async for notice in link:
        into.append(notice)


def test_every_notice_in_order(tmp_path: Path) -> None:
    told = [Published(0), Settled((1, 2)), Settled(()), Dropped(3), Published(1), Ended(1, False)]

    async def main() -> None:
        notices = Notices()
        notices.post(told[0])
        async with serve(LinkServer(notices, new), tmp_path) as address:
            link, got = Link(address, TOKEN, Ticks()), []
            assert await link.where(10) is None
            reading = asyncio.create_task(read(link, got))
            for notice in told[1:]:
                notices.post(notice)
                await asyncio.sleep(0.005)
            await reading
            assert got == told
            await link.close()

    run(main)


def test_a_lost_connection_is_told_and_a_successor_reads_everything(tmp_path: Path) -> None:
    """Another orchestrator takes the place of one whose trainer went away; the run is new."""
    told = [Published(0), Settled((1,)), Dropped(2), Ended(1, True)]

    async def main() -> None:
        notices = Notices()
        server = LinkServer(notices, new)
        link, got = Link(f"unix:{tmp_path}/l", TOKEN, Ticks()), []
        async with serve(server, tmp_path):
            assert await link.where(10) is None
            reading = asyncio.create_task(read(link, got))
            for notice in told[:2]:
                notices.post(notice)
            while len(got) < 2:
                await asyncio.sleep(0)
        with pytest.raises(ConnectionLost):
            await reading
        await link.close()
        for notice in told[2:]:
            notices.post(notice)
        async with serve(server, tmp_path):
            link, again = Link(f"unix:{tmp_path}/l", TOKEN, Ticks()), []
            assert await link.where(10) is None
            await read(link, again)
            await link.close()
        assert (got, again) == (told[:2], told)

    run(main)


def test_a_question_without_an_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "ASK_S", 0.01)

    async def main() -> None:
        notices, asked = Notices(), asyncio.Event()
        after = notices.after

        async def counted(seen: int) -> list[Notice]:
            times.append(seen)
            if len(times) == 3:
                asked.set()
            return await after(seen)

        times: list[int] = []
        notices.after = counted
        async with serve(LinkServer(notices, new), tmp_path) as address:
            link, got = Link(address, TOKEN, Ticks()), []
            await link.where(10)
            reading = asyncio.create_task(read(link, got))
            await asked.wait()
            notices.post(Ended(0, False))
            await reading
            assert got == [Ended(0, False)] and set(times) == {0}
            await link.close()

    run(main)


def test_where_a_run_goes_on_travels_whole_and_what_was_told_before_is_left_out(
    tmp_path: Path,
) -> None:
    async def where() -> Rollouts:
        return GOES_ON

    async def main() -> None:
        notices = Notices()
        for notice in (Published(3), Settled((1,)), Published(4)):
            notices.post(notice)
        async with serve(LinkServer(notices, where), tmp_path) as address:
            link, got = Link(address, TOKEN, Ticks()), []
            assert await link.where(10) == GOES_ON
            notices.post(Settled((5, 6)))
            notices.post(Ended(4, True))
            await read(link, got)
            assert got == [Published(4), Settled((5, 6)), Ended(4, True)]
            await link.close()

    run(main)


def test_whoever_takes_over_after_the_end_hears_of_it(tmp_path: Path) -> None:
    async def where() -> Rollouts:
        return GOES_ON

    async def main() -> None:
        notices = Notices()
        for notice in (Published(3), Published(4), Ended(4, True)):
            notices.post(notice)
        async with serve(LinkServer(notices, where), tmp_path) as address:
            link, got = Link(address, TOKEN, Ticks()), []
            await link.where(10)
            await read(link, got)
            assert got == [Published(4), Ended(4, True)]
            await link.close()

    run(main)


def test_the_queue_is_asked_again_when_others_are_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        asked: list[tuple[int, ...]] = []
        server = LinkServer(Notices(), new, lambda: asked.append(tuple(server.oldest_in_flight())))
        async with serve(server, tmp_path) as address:
            link = Link(address, TOKEN, Ticks())
            await link.where(10)
            for versions in ([2], [2], [2, 3]):
                link.in_flight(versions)
            await link.done()
            assert asked == [(2,), (2, 3)]
            await link.close()
        assert asked[-1] == (), "who is gone has nothing in flight"

    run(main)


def test_versions_in_flight_and_the_end_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        server = LinkServer(Notices(), new)
        async with serve(server, tmp_path) as address:
            link = Link(address, TOKEN, Ticks())
            link.in_flight([9])
            await link.where(10)
            assert tuple(server.oldest_in_flight()) == (), "lost: there was no connection"
            link.in_flight(iter([3, 1]))
            assert not server.done.is_set()
            await link.done()
            assert server.done.is_set()
            assert tuple(server.oldest_in_flight()) == (3, 1), "told before"
            await link.close()

    run(main)
