"""[H] The contract of every queue: complete groups in, batches of admitted groups out.

`SharedQueue` is what any process can do, `Queue` what the one can that holds the groups.

A queue knows neither tasks nor models. Pacing belongs to the orchestrator, staleness to the policy
given to `get`. tests/queues/ holds each implementation to what is written here.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from rl_jax.staleness import Admit, Drop, Wait
from rl_jax.trajectories.types import Group

State = Mapping[str, Any]
"""Plain msgpack values, always the same keys."""

OnPut = Callable[[Group], Awaitable[object]]
"""Makes a group durable; `put` returns only after it did."""
OnDrop = Callable[[Group, str], object]
"""Hears of every group that a policy dropped, and why, at that moment."""


class QueueFailed(RuntimeError):
    """A program on the other side of the queue broke; says how."""


class QueueClosed(RuntimeError):
    """No further group will come."""


UNDECIDED = Wait(math.inf, Drop("undecided"))
"""Answered by an `admit` that has to ask elsewhere first. The group stays as if it had not been
asked about; `reconsider` when the decision is known."""


@runtime_checkable
class SharedQueue(Protocol):
    """Bounded; every wait ends by its timeout (`TimeoutError`), by `fail` or by `close`."""

    async def put(self, group: Group, *, timeout: float) -> None:
        """Adds a group once there is room and it is durable. Groups keep the order in which room
        was found for them."""
        ...

    async def get(self, n: int, admit: Admit, *, step: int, timeout: float) -> list[Group]:
        """Takes `n` admitted groups for update `step`, all in one instant, or none.

        All n were admitted at the published version of that instant. Those sampled longest ago go
        first, equals in queue order. Groups that `admit` drops leave the queue at once; those that
        shall wait are asked about again at every change, and no later than their deadline. The
        groups delivered stay in the state until `ack`. A `ValueError` where `n` is above the
        queue's capacity, or `step` below an earlier one.
        """
        ...

    def ack(self, step: int) -> None:
        """Forgets what was delivered for every update up to `step`. Cumulative. Call it when the
        checkpoint that contains the update is being made, before `get_state` for it."""
        ...

    def reconsider(self) -> None:
        """Asks about waiting groups again: a version was published or a rollout ended."""
        ...

    def fail(self, error: BaseException) -> None:
        """Wakes every waiter, and answers every later call, with `QueueFailed` from this error."""
        ...

    def close(self) -> None:
        """No more puts. `get` goes on while it can be served, then raises `QueueClosed`."""
        ...


@runtime_checkable
class Queue(SharedQueue, Protocol):
    """With its content at hand, so that a checkpoint can have it of one instant."""

    def get_state(self) -> State:
        """Everything not acked: deliveries by update, then the queue, each in order. A group whose
        `put` has not returned is included, so a journal replayed on top may name it again."""
        ...

    def set_state(self, state: State) -> None:
        """Replaces the content. What was delivered but not acked is first in the queue again, in
        the order of delivery. Strict: a `ValueError` for anything `get_state` does not make."""
        ...
