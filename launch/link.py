"""[H] What passes between the trainer's and the orchestrator's process besides groups: notices,
where the run goes on, and which versions rollouts under way have tokens of."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from launch.notices import Dropped, Ended, Notice, Notices, Published, Settled
from launch.resume import Rollouts
from rl_jax.orchestrator.state import Resume
from rl_jax.trajectories.codec import decode_key
from rl_jax.wire.client import Client
from rl_jax.wire.connection import Connection, Methods
from rl_jax.wire.frames import Clock
from rl_jax.wire.server import serve

_KINDS: Mapping[str, Callable[..., Notice]] = {
    kind.__name__: kind for kind in (Published, Settled, Dropped, Ended)
}
ASK_S = 30.0
"""An answer without news comes after that long."""
GRACE_S = 30.0

Where = Callable[[], Awaitable[Rollouts | None]]
"""Where rollouts go on, by the record; None where there is no version."""


class LinkServer:
    """The trainer's end."""

    def __init__(
        self, notices: Notices, where: Where, on_in_flight: Callable[[], object] = lambda: None
    ) -> None:
        """`on_in_flight` is called whenever other rollouts are under way than before."""
        self._notices, self._ask_record = notices, where
        self._on_in_flight = on_in_flight
        self._oldest: tuple[int, ...] = ()
        self.done = asyncio.Event()
        """The orchestrator has done all it had to."""

    def oldest_in_flight(self) -> Iterable[int]:
        """What the orchestrator said last."""
        return self._oldest

    def serve(self, address: str, token: str, clock: Clock) -> AbstractAsyncContextManager[str]:
        """`async with`: serves until left; gives the address. OSError where it is in use."""
        return serve(address, self._session, token=token, clock=clock, errors=())

    @asynccontextmanager
    async def _session(self, peer: Connection) -> AsyncIterator[Methods]:
        try:
            yield {
                "where": self._where,
                "notices": self._news,
                "in_flight": self._in_flight,
                "done": self.done.set,
            }
        finally:
            self._in_flight([])

    async def _where(self) -> Mapping[str, Any]:
        # Counted first: what is settled meanwhile is told twice, and known by its prompt. The end
        # is told to everyone.
        seen = len(self._notices) - self._notices.ended
        found = await self._ask_record()
        if found is None:
            return {"seen": 0}
        resume, lost, evaluated = found
        return {
            "seen": seen,
            "version": resume.published,
            "resume": [*resume],
            "lost": lost,
            "evaluated": sorted(evaluated),
        }

    async def _news(self, seen: int) -> list[list[Any]]:
        try:
            async with asyncio.timeout(ASK_S):
                news = await self._notices.after(seen)
        except TimeoutError:
            return []
        return [[type(notice).__name__, *notice] for notice in news]

    def _in_flight(self, versions: list[int]) -> None:
        before, self._oldest = self._oldest, tuple(map(int, versions))
        if before != self._oldest:
            self._on_in_flight()


class Link:
    """The orchestrator's end; iterate it for notices, after `where`."""

    def __init__(self, address: str, token: str, clock: Clock) -> None:
        self._client = Client(address, token=token, clock=clock, errors=(), methods={})
        self._seen = 0
        self._version: int | None = None

    async def where(self, timeout: float) -> Rollouts | None:
        """Where the run goes on; None where it is new. Waits for the trainer to be there."""
        connection = await self._client.connect(timeout)
        told = await connection.call("where", timeout=timeout)
        self._seen, self._version = told["seen"], told.get("version")
        if self._version is None:
            return None
        next_prompt, reissue, queued, *counts = told["resume"]
        pairs = tuple(map(tuple, reissue)), tuple(map(tuple, queued))
        lost = tuple(map(decode_key, told["lost"]))
        return Rollouts(Resume(next_prompt, *pairs, *counts), lost, frozenset(told["evaluated"]))

    async def __aiter__(self) -> AsyncIterator[Notice]:
        if self._version is not None:
            yield Published(self._version)
        while True:
            connection = await self._client.connect(GRACE_S)
            news = await connection.call("notices", self._seen, timeout=ASK_S + GRACE_S)
            for name, *fields in news:
                self._seen += 1
                plain = [tuple(f) if isinstance(f, list) else f for f in fields]
                notice: Notice = _KINDS[name](*plain)
                yield notice
                if isinstance(notice, Ended):
                    return

    def in_flight(self, versions: Iterable[int]) -> None:
        """Tells the trainer; lost where there is no connection, since the next one follows."""
        if (connection := self._client.connection) is not None:
            connection.tell("in_flight", list(versions))

    async def done(self) -> None:
        """Tells the trainer that nothing is left to do here."""
        connection = await self._client.connect(GRACE_S)
        await connection.call("done", timeout=GRACE_S)

    async def close(self) -> None:
        await self._client.close()
