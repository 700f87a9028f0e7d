"""A stop: by signal and from inside, while work goes on and before it."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.stop import Stop, Stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_is_waited_for(number: signal.Signals) -> None:
    cancelled = []

    async def work() -> None:
        signal.raise_signal(number)
        try:
            await asyncio.Future()
        finally:
            cancelled.append(True)

    async def main() -> None:
        stop = Stop()
        stop.listen()
        try:
            assert await asyncio.wait_for(stop.unless(work()), 10) is None
            assert stop.asked and stop.signal == number and cancelled == [True]
            await asyncio.wait_for(stop.wait(), 10)
        finally:
            stop.ignore()

    before = signal.getsignal(number)
    asyncio.run(main())
    assert signal.getsignal(number) in (before, signal.default_int_handler, signal.SIG_DFL)


def test_work_that_ends_first_is_what_it_returns_or_raises() -> None:
    async def seven() -> int:
        return 7

    async def broken() -> int:
        raise KeyError("own")

    async def main() -> None:
        stop = Stop()
        assert await stop.unless(seven()) == 7
        with pytest.raises(KeyError):
            await stop.unless(broken())
        stop.ask()
        assert await stop.unless(broken()) is None, "never begun"
        assert stop.signal is None

    asyncio.run(main())


def test_who_waits_and_is_cancelled_cancels_the_work() -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Future()
            finally:
                gone.set()

        waiting = asyncio.create_task(Stop().unless(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert gone.is_set()

    asyncio.run(main())


def test_the_second_signal_ends_the_process() -> None:
    code = (
        "import asyncio, signal; from launch.stop import Stop\n"
        "async def main():\n"
        "    stop = Stop(); stop.listen()\n"
        "    signal.raise_signal(15); await stop.wait(); print('asked', flush=True)\n"
        "    signal.raise_signal(15); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == (b"asked\n", -signal.SIGTERM)


def test_the_status_is_the_shells() -> None:
    assert Stopped(Path("runs/a"), signal.SIGINT).status == 130
    by_request = Stopped(Path("runs/a"), None)
    assert by_request.status == 143
    assert str(by_request) == "stopped by a request; go on with `rl-jax resume runs/a`"
