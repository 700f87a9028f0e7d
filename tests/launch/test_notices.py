"""Notices reach every reader once, in order, however late it asks."""

import asyncio

from launch.notices import Dropped, Ended, Notices, Published, Settled


def test_readers_before_and_after_a_post_see_the_same() -> None:
    told = [Published(0), Settled((1, 2)), Dropped(3), Published(1), Ended(1, True)]

    async def main() -> list[list[object]]:
        notices = Notices()

        async def all_of_them() -> list[object]:
            return [notice async for notice in notices]

        early = asyncio.create_task(all_of_them())
        await asyncio.sleep(0)
        for notice in told[:3]:
            notices.post(notice)
            await asyncio.sleep(0)
        middle = asyncio.create_task(all_of_them())
        for notice in told[3:]:
            notices.post(notice)
        notices.post(Published(9))
        return [await early, await middle, await all_of_them()]

    async def bounded() -> list[list[object]]:
        async with asyncio.timeout(10):
            return await main()

    assert asyncio.run(bounded()) == [told] * 3, "the end is the last that is read"


def test_after_waits_for_news_and_gives_all_of_it() -> None:
    async def main() -> None:
        notices = Notices()
        asking = asyncio.create_task(notices.after(1))
        notices.post(Published(0))
        await asyncio.sleep(0)
        assert not asking.done() and len(notices) == 1
        notices.post(Dropped(4))
        notices.post(Dropped(5))
        assert await asyncio.wait_for(asking, 10) == [Dropped(4), Dropped(5)]
        assert await notices.after(0) == [Published(0), Dropped(4), Dropped(5)]

    asyncio.run(main())
