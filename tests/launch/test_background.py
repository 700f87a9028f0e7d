"""Native work on a thread: its result, its error, and a caller that goes away."""

import asyncio
import threading

import pytest

from launch.background import in_background


def test_result_and_error_come_back() -> None:
    def fail() -> int:
        raise KeyError("own")

    async def main() -> None:
        here = threading.get_ident()
        assert await in_background(threading.get_ident) != here
        with pytest.raises(KeyError, match="own"):
            await in_background(fail)

    asyncio.run(main())


def test_a_cancelled_caller_does_not_wait_and_nobody_is_told() -> None:
    """Neither the loop, where it runs on, nor a loop that is closed by then hears of the end."""
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(30)
        assert threading.current_thread().daemon
        ended.set()

    async def main() -> None:
        waiting = asyncio.create_task(in_background(work))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not release.is_set()

    asyncio.run(main())
    release.set()
    assert ended.wait(30), "a daemon: the process does not wait for it"
