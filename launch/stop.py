"""[H] Ending a run from outside: the first SIGINT or SIGTERM asks, the second insists."""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A signal ended the run, orderly; the text says how to go on."""

    def __init__(self, run_dir: Path, number: int | None) -> None:
        self.status = 128 + (number or signal.SIGTERM)
        name = signal.Signals(number).name if number else "a request"
        self._by = f"stopped by {name}"
        super().__init__(f"{self._by}; go on with `rl-jax resume {run_dir}`")

    def before_it_began(self) -> "Stopped":
        """The same of a run that had written nothing, whose directory is gone."""
        self.args = (f"{self._by} before the run wrote anything: start it again",)
        return self


class Stop:
    """Whether this process was asked to stop; use on one event loop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """What asked for it."""
        self._asked = asyncio.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def listen(self) -> None:
        """Takes SIGINT and SIGTERM from now on, until `ignore`."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._heard, number)

    def ignore(self) -> None:
        """Gives the signals back."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def ask(self) -> None:
        """What a signal does, from inside."""
        self._asked.set()

    async def wait(self) -> None:
        await self._asked.wait()

    async def unless[T](self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns; None where the stop comes first, and `work` is cancelled then."""
        if self.asked:
            work.close()
            return None
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for pending in (task, asked):
                pending.cancel()
            await asyncio.wait({task, asked})

    async def waits_for(self, work: Coroutine[Any, Any, object]) -> bool:
        """Whether `work` came to its end; False where the stop came first."""

        if self.asked:
            work.close()
            return False

        async def completed() -> bool:
            await work
            return True

        return await self.unless(completed()) is True

    def _heard(self, number: int) -> None:
        if self._asked.is_set():
            # Now: the default action of the signal.
            self.ignore()
            signal.raise_signal(number)
        self.signal = number
        self._asked.set()
