"""[H] What the trainer tells the orchestrator: versions, batches done with, the end.

A list that only grows; a reader asks for what follows the last one it has seen, so nothing is lost
between two questions, in one process or between two.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple


class Published(NamedTuple):
    """This version is the newest from now on."""

    version: int


class Settled(NamedTuple):
    """A batch of the groups of these prompts was trained on."""

    prompts: tuple[int, ...]


class Dropped(NamedTuple):
    """The queue dropped this prompt's group."""

    prompt: int


class Ended(NamedTuple):
    """No group will be taken any more; `finished`: all updates are done."""

    version: int
    finished: bool


Notice = Published | Settled | Dropped | Ended


class Notices:
    """Posted on one event loop, read there by anyone."""

    def __init__(self) -> None:
        self._told: list[Notice] = []
        self._more = asyncio.Event()

    def __len__(self) -> int:
        return len(self._told)

    @property
    def ended(self) -> bool:
        """Whether the last one is `Ended`."""
        return bool(self._told) and isinstance(self._told[-1], Ended)

    def post(self, notice: Notice) -> None:
        self._told.append(notice)
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, seen: int) -> list[Notice]:
        """Those that follow the first `seen`, at least one: waits for it."""
        while len(self._told) <= seen:
            await self._more.wait()
        return self._told[seen:]

    async def __aiter__(self) -> AsyncIterator[Notice]:
        """Every notice from the first, up to and with `Ended`."""
        seen = 0
        while True:
            for notice in await self.after(seen):
                seen += 1
                yield notice
                if isinstance(notice, Ended):
                    return
