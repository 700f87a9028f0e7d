"""[H] Keeps the roles of a run alive: starts them, heals a crash by restart, ends them in order."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from launch.engine.base import USER_ERROR, Engine, Exited, Group, GroupSpec, Started, cause
from launch.engine.exits import in_words
from launch.tails import last_lines
from rl_jax.config.base import UserError

GRACE_S = 8.0
"""From TERM to KILL, for all roles together: batch systems and preemption often leave 10 s."""
TAIL_LINES = 20


class RoleFailed(RuntimeError):
    """A role that the run cannot do without is lost; tells how, and the end of its log."""


class Restart(NamedTuple):
    """At most `max_restarts` within any `window_s` seconds. The first of them comes after
    `backoff_s`, every further one after twice as long as the one before, up to 32 times."""

    max_restarts: int
    window_s: float
    backoff_s: float

    def delay(self, restarts: Sequence[float], now: float) -> float | None:
        """Seconds to wait before a restart, after those at the times `restarts`; None: no more."""
        recent = sum(now - time < self.window_s for time in restarts)
        if recent >= self.max_restarts:
            return None
        return self.backoff_s * 2 ** min(recent, 5)


class Role(NamedTuple):
    """One program of the run. `spec` gives what to start in an attempt (0, 1, ...), always under
    the role's name.

    A run ends when every role with `ends_run` has exited with 0; any other exit is a crash and so
    is 0 of a role without it. The loss of a role that is not `essential` does not end the run,
    unless it `ends_run`.
    """

    name: str
    spec: Callable[[int], GroupSpec]
    restart: Restart
    essential: bool
    ends_run: bool


class Supervisor:
    """Runs `roles` on `engine`; they start together and are sent TERM in the order given.

    `on_started(role, pid)` and `on_ended(role, pid, code)` are told of every process,
    `on_lost(role, why)` of a role that the run goes on without.
    """

    def __init__(
        self,
        engine: Engine,
        roles: Sequence[Role],
        *,
        grace_s: float = GRACE_S,
        on_started: Callable[[str, int], None] = lambda role, pid: None,
        on_ended: Callable[[str, int, int], None] = lambda role, pid, code: None,
        on_lost: Callable[[str, str], None] = lambda role, why: None,
    ) -> None:
        names = [role.name for role in roles]
        if len(set(names)) < len(names):
            raise ValueError(f"roles {', '.join(names)}: a name is there twice")
        if not any(role.ends_run for role in roles):
            raise ValueError(f"roles {', '.join(names)}: none of them ends the run")
        self._engine, self._roles, self._grace_s = engine, roles, grace_s
        self._on_started, self._on_ended, self._on_lost = on_started, on_ended, on_lost
        self._groups: dict[str, Group] = {}
        self.signal: int | None = None
        """The signal that ended the run."""
        self._ending = False
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        """Ends the run: TERM to all roles, KILL after the grace; called again, KILL at once."""
        (self._at_once if self._stop.is_set() else self._stop).set()

    def _signalled(self, number: int) -> None:
        self.signal = self.signal or number
        self.stop()

    async def run(self) -> bool:
        """Returns when no process is left: True where the run came to its end, False where `stop`,
        SIGINT or SIGTERM ended it.

        Raises UserError where a role exits with USER_ERROR, RoleFailed where an essential one is
        beyond its restarts, and what the engine raises for a role it cannot start or end.
        """
        keepers = {role.name: asyncio.create_task(self._keep(role)) for role in self._roles}
        with self._signals():
            try:
                completed = await self._until_over(keepers)
            finally:
                await self._end(keepers)
        for keeper in keepers.values():
            if not keeper.cancelled():
                keeper.result()
        return completed

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _until_over(self, keepers: dict[str, asyncio.Task[None]]) -> bool:
        stopped = asyncio.create_task(self._stop.wait())
        running = set(keepers.values())
        awaited = {keepers[role.name] for role in self._roles if role.ends_run}
        try:
            while awaited & running and not stopped.done():
                done, _ = await asyncio.wait(
                    {stopped, *running}, return_when=asyncio.FIRST_COMPLETED
                )
                running -= done
                for keeper in done - {stopped}:
                    keeper.result()
        finally:
            stopped.cancel()
        return not awaited & running

    async def _keep(self, role: Role) -> None:
        """Returns when the role is done, or lost without need."""
        restarts: list[float] = []
        for attempt in count():
            exited = await self._attempt(role, attempt)
            log = self._groups.pop(role.name).log(exited.index)
            if self._ending or (role.ends_run and exited.code == 0):
                return
            if exited.code == USER_ERROR:
                raise UserError(_tail(log, 1).removeprefix("rl-jax: ") or f"see {log}")
            now = asyncio.get_running_loop().time()
            delay = role.restart.delay(restarts, now)
            if delay is None:
                return self._lose(role, exited, log)
            await asyncio.sleep(delay)
            restarts.append(now + delay)

    async def _attempt(self, role: Role, attempt: int) -> Exited:
        """One life of the role: the exit that tells how it ended."""
        spec = role.spec(attempt)
        if spec.name != role.name:
            raise ValueError(f"role {role.name}: its group is called {spec.name}")
        group = self._groups[role.name] = await self._engine.start_group(spec)
        exits: list[Exited] = []
        async for event in group.events():
            match event:
                case Started(pid):
                    self._on_started(role.name, pid)
                case Exited(_, pid, code):
                    exits.append(event)
                    self._on_ended(role.name, pid, code)
        return cause(exits)

    def _lose(self, role: Role, exited: Exited, log: Path) -> None:
        policy = role.restart
        why = (
            f"{role.name}: {in_words(exited)}, after {policy.max_restarts} restarts within "
            f"{policy.window_s:g} s; the end of {log}:"
        )
        if role.essential or role.ends_run:
            raise RoleFailed(f"{why}\n{_tail(log, TAIL_LINES)}")
        self._on_lost(role.name, f"{why} {_tail(log, 1)}")

    async def _end(self, keepers: dict[str, asyncio.Task[None]]) -> None:
        """TERM in order, KILL after the grace or when asked to; the keepers see to the end."""
        self._ending = True
        for name, keeper in keepers.items():
            if name not in self._groups:  # it starts a group, or waits to
                keeper.cancel()
        groups = [self._groups[role.name] for role in self._roles if role.name in self._groups]
        killing = asyncio.gather(*(group.kill(self._grace_s) for group in groups))
        hurry = asyncio.create_task(self._at_once.wait())
        await asyncio.wait({killing, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not killing.done():
            await asyncio.gather(*(group.kill(0.0) for group in groups))
        await killing
        await asyncio.gather(*keepers.values(), return_exceptions=True)


def _tail(log: Path, lines: int) -> str:
    """The last `lines` that are not empty; none where the log is not on a disk of this machine."""
    return "\n".join(last_lines(log, lines)) if log.exists() else ""
