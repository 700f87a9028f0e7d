"""[H] The queue inside one process: one event loop, no threads.

Every method, `fail` too, is called on the loop; from a thread use `loop.call_soon_threadsafe`.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_jax.queues.base import UNDECIDED, OnDrop, OnPut, QueueClosed, QueueFailed, State
from rl_jax.staleness import Admit, Drop, Take, Wait
from rl_jax.trajectories.codec import decode_group, encode_group
from rl_jax.trajectories.types import Group


@dataclass(eq=False)
class _Entry:
    group: Group
    oldest: int
    durable: bool
    wait_until: float | None = None
    """When waiting ends, once a policy asked for it."""


class MemoryQueue:
    """`Queue` in memory, of at most `capacity` groups waiting to be taken.

    `published_version()` is asked at every decision.
    """

    def __init__(
        self,
        capacity: int,
        published_version: Callable[[], int],
        on_put: OnPut | None = None,
        on_drop: OnDrop | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"queue capacity is {capacity}; at least 1")
        self._capacity = capacity
        self._published_version = published_version
        self._on_put = on_put
        self._on_drop = on_drop
        self._entries: list[_Entry] = []
        self._unacked: dict[int, list[Group]] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._closed = False

    def __len__(self) -> int:
        """Groups waiting to be taken."""
        return len(self._entries)

    async def put(self, group: Group, *, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        self._check(closed=True)
        while len(self._entries) >= self._capacity:
            if not await self._change(deadline):
                raise TimeoutError(f"no room for a group in {timeout:g} s: {self._describe()}")
            self._check(closed=True)
        # The entry holds its place while it is made durable: order and bound are decided here.
        entry = _Entry(group, group.oldest_version, durable=self._on_put is None)
        self._entries.append(entry)
        if self._on_put is not None:
            await self._make_durable(entry, self._on_put, deadline)
        self._wake()

    async def get(self, n: int, admit: Admit, *, step: int, timeout: float) -> list[Group]:
        if not 1 <= n <= self._capacity:
            raise ValueError(f"a batch of {n} groups from a queue of {self._capacity}")
        if step < max(self._unacked, default=step):
            raise ValueError(f"groups for update {step} after those for {max(self._unacked)}")
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            self._check(closed=False)
            chosen, ask_again = self._choose(n, admit)
            if len(chosen) == n:
                return self._deliver(chosen, step)
            if self._closed and not ask_again and all(e.durable for e in self._entries):
                raise QueueClosed(f"queue closed with {self._describe()}; {n} wanted")
            now = asyncio.get_running_loop().time()
            if now >= deadline:
                raise TimeoutError(f"no {n} groups in {timeout:g} s: {self._describe()}")
            await self._change(min([deadline, *ask_again]))

    def ack(self, step: int) -> None:
        self._unacked = {s: groups for s, groups in self._unacked.items() if s > step}

    def reconsider(self) -> None:
        self._wake()

    def get_state(self) -> State:
        return {
            "unacked": [
                {"step": step, "groups": [encode_group(g) for g in groups]}
                for step, groups in sorted(self._unacked.items())
            ],
            "queued": [encode_group(e.group) for e in self._entries],
        }

    def set_state(self, state: State) -> None:
        groups = _decode_state(state)
        self._unacked = {}
        self._entries = [_Entry(g, g.oldest_version, durable=True) for g in groups]
        self._wake()

    def fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def _make_durable(self, entry: _Entry, on_put: OnPut, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await on_put(entry.group)
        except BaseException:
            # Cancelled, too late or not durable: the group was never put.
            if entry in self._entries:
                self._entries.remove(entry)
            self._wake()
            raise
        entry.durable = True

    def _choose(self, n: int, admit: Admit) -> tuple[list[_Entry], list[float]]:
        """Up to n admitted entries, and the times at which waiting ends for others."""
        now = asyncio.get_running_loop().time()
        published = self._published_version()
        chosen: list[_Entry] = []
        ask_again: list[float] = []
        ready = [e for e in self._entries if e.durable]
        for entry in sorted(ready, key=lambda e: e.oldest):
            if len(chosen) == n:
                break
            decision = admit(entry.group, published)
            if decision is UNDECIDED:
                ask_again.append(math.inf)
                continue
            if isinstance(decision, Wait):
                if entry.wait_until is None:
                    entry.wait_until = now + decision.deadline
                if now < entry.wait_until:
                    ask_again.append(entry.wait_until)
                    continue
                decision = decision.then
            match decision:
                case Take():
                    chosen.append(entry)
                case Drop(reason):
                    self._drop(entry, reason)
        return chosen, ask_again

    def _drop(self, entry: _Entry, reason: str) -> None:
        self._entries.remove(entry)
        self._wake()
        if self._on_drop is not None:
            self._on_drop(entry.group, reason)

    def _deliver(self, chosen: list[_Entry], step: int) -> list[Group]:
        for entry in chosen:
            self._entries.remove(entry)
        groups = [entry.group for entry in chosen]
        self._unacked.setdefault(step, []).extend(groups)
        self._wake()
        return groups

    def _check(self, *, closed: bool) -> None:
        if self._error is not None:
            text = f"{type(self._error).__name__}: {self._error}"
            raise QueueFailed(f"queue failed: {text}") from self._error
        if closed and self._closed:
            raise QueueClosed("put into a closed queue")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, until: float) -> bool:
        """Waits for the next change; False where none came until then."""
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _describe(self) -> str:
        return f"{len(self._entries)} of {self._capacity} queued, {len(self._unacked)} not acked"


def _decode_state(state: object) -> list[Group]:
    fields = _map("state", state, {"unacked", "queued"})
    groups: list[Any] = []
    last = -1
    for delivery in _list("unacked", fields["unacked"]):
        entry = _map("unacked", delivery, {"step", "groups"})
        if type(entry["step"]) is not int or entry["step"] <= last:
            raise ValueError(f"queue state: step {entry['step']!r} after {last}")
        last = entry["step"]
        groups += _list("groups", entry["groups"])
    return [decode_group(g) for g in [*groups, *_list("queued", fields["queued"])]]


def _map(name: str, value: object, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) != keys:
        raise ValueError(f"queue state: {name} is no map of {sorted(keys)}")
    return value


def _list(name: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"queue state: {name} is no list")
    return value
