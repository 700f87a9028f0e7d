"""[H] What happened to the processes of one group, as events; whoever listens hears all of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from launch.engine.base import Exited, ProcessEvent, Started, cause
from launch.engine.exits import in_words


@runtime_checkable
class Mortal(Protocol):
    """A group of which its engine knows whether a process of it lives."""

    @property
    def alive(self) -> bool: ...


def claim[G: Mortal](name: str, groups: dict[str, G | None], *, closed: bool) -> None:
    """Notes in an engine's `groups` that one is about to start, by None until it has. ValueError
    where one of that name lives or starts, RuntimeError where the engine is `closed`."""
    if closed:
        raise RuntimeError(f"{name}: the engine is closed")
    living = groups.get(name)
    if name in groups and (living is None or living.alive):
        raise ValueError(f"a group {name} is alive already: one at a time")
    groups[name] = None


class History:
    """Of processes that have all started. The first that ends takes the others with it: `kill` is
    called with `grace_s`, after an orderly exit only once the others had that long to follow."""

    def __init__(
        self,
        name: str,
        pids: Sequence[int],
        grace_s: float,
        kill: Callable[[float], Awaitable[None]],
    ) -> None:
        self.exits: dict[int, Exited] = {}
        """By the index of the process, in the order in which they ended."""
        self._name, self._size, self._grace_s, self._kill = name, len(pids), grace_s, kill
        self._events: list[ProcessEvent] = [Started(pid) for pid in pids]
        self._changed = asyncio.Event()
        self._died, self._ended = asyncio.Event(), asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._stuck: TimeoutError | None = None
        if not pids:
            self._ended.set()

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    def tell(self, exited: Exited) -> None:
        self._events.append(exited)
        self.exits[exited.index] = exited
        self._died.set()
        if len(self.exits) == self._size:
            self._ended.set()
        elif len(self.exits) == 1:
            self._ending = asyncio.create_task(self._end_the_rest(exited))
        self._wake()

    async def events(self) -> AsyncIterator[ProcessEvent]:
        """As `Group.events`."""
        told = 0
        while True:
            while told < len(self._events):
                told += 1
                yield self._events[told - 1]
            if self._ended.is_set():
                return
            if self._stuck:
                raise self._stuck
            await self._changed.wait()

    async def ends_within(self, seconds: float) -> bool:
        """Whether all have exited by then."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def first_exit(self) -> None:
        """Until one has exited."""
        await self._died.wait()

    def obituary(self) -> str:
        """Of a group of which one has exited."""
        return f"{self._name} has ended: {in_words(cause(list(self.exits.values())))}"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _end_the_rest(self, first: Exited) -> None:
        if first.code == 0 and await self.ends_within(self._grace_s):
            return
        try:
            await self._kill(self._grace_s)
        except TimeoutError as error:
            self._stuck = error
            self._wake()
