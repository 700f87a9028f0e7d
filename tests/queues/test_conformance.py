"""What `rl_jax/queues/base.py` promises, for each implementation."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest

from rl_jax.queues.base import QueueClosed, QueueFailed
from rl_jax.queues.memory import MemoryQueue
from rl_jax.queues.socket import QueueServer, SocketQueue
from rl_jax.staleness import Drop, Take, Wait, drop_stale, lag, wait_for_stragglers
from rl_jax.trajectories.types import Group
from tests.fakes.ticks import Ticks
from tests.queues import clock
from tests.queues.clock import now, settle
from tests.trajectories.build import group, same_group

Make = Callable[..., Awaitable[Any]]
OPEN: ContextVar[AsyncExitStack] = ContextVar("OPEN")
"""What ends with the running test."""


def run[T](main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def whole() -> T:
        async with AsyncExitStack() as stack:
            OPEN.set(stack)
            return await main()

    return clock.run(whole)


@pytest.fixture(params=["memory", "socket"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """(capacity, published_version, on_put, on_drop) -> queue."""
    numbers = count()

    async def build(
        capacity: int = 8, published: Callable[[], int] = lambda: 0, **hooks: Any
    ) -> Any:
        queue = MemoryQueue(capacity, published, **hooks)
        if request.param == "memory":
            return queue
        server = QueueServer(queue, token="secret", clock=Ticks())
        address = f"unix:{tmp_path}/{next(numbers)}"
        await OPEN.get().enter_async_context(server.serve(address))
        far = SocketQueue(address, token="secret", clock=Ticks())
        OPEN.get().push_async_callback(far.disconnect)
        return far

    return build


async def state_of(queue: Any) -> Any:
    state = queue.get_state()
    return await state if inspect.isawaitable(state) else state


async def restore(queue: Any, state: Any) -> None:
    done = queue.set_state(state)
    if inspect.isawaitable(done):
        await done


def take_all(group: Group, published: int) -> Take:
    return Take()


def prompts(groups: list[Group]) -> list[int]:
    return [g.prompt for g in groups]


async def fill(queue: Any, *groups: Group) -> None:
    for g in groups:
        await queue.put(g, timeout=1)


async def state_prompts(queue: Any) -> tuple[list[tuple[int, list[int]]], list[int]]:
    state = await state_of(queue)
    unacked = [(d["step"], [g["prompt"] for g in d["groups"]]) for d in state["unacked"]]
    return unacked, [g["prompt"] for g in state["queued"]]


# --- order and content ---------------------------------------------------------------------------


def test_groups_come_out_whole_and_in_order(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        sent = [group(i) for i in range(5)]
        await fill(queue, *sent)
        got = await queue.get(3, take_all, step=0, timeout=1)
        got += await queue.get(2, take_all, step=1, timeout=1)
        assert all(map(same_group, got, sent))

    run(main)


def test_the_oldest_version_goes_first(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, group(0, 3), group(1, 1), group(2, 3), group(3, 1))
        assert prompts(await queue.get(3, take_all, step=0, timeout=1)) == [1, 3, 0]

    run(main)


def test_get_is_all_or_nothing(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, group(0))
        with pytest.raises(TimeoutError, match="no 2 groups in 5 s: 1 of 8 queued"):
            await queue.get(2, take_all, step=0, timeout=5)
        assert now() == 5
        assert await state_prompts(queue) == ([], [0])

    run(main)


def test_a_waiting_get_is_served_by_puts(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        async with asyncio.TaskGroup() as tasks:
            batch = tasks.create_task(queue.get(2, take_all, step=0, timeout=9))
            await settle()
            await fill(queue, group(0))
            await settle()
            assert not batch.done()
            await fill(queue, group(1))
        assert prompts(batch.result()) == [0, 1]
        assert now() == 0

    run(main)


def test_a_cancelled_get_takes_nothing(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        batch = asyncio.create_task(queue.get(2, take_all, step=0, timeout=9))
        await settle()
        await fill(queue, group(0))
        batch.cancel()
        await fill(queue, group(1))
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert await state_prompts(queue) == ([], [0, 1])

    run(main)


def test_many_producers_and_consumers_lose_and_repeat_nothing(make: Make) -> None:
    async def main() -> None:
        queue = await make(capacity=3)
        got: list[int] = []

        async def consume(times: int) -> None:
            for _ in range(times):
                got.extend(prompts(await queue.get(3, take_all, step=0, timeout=60)))

        async with asyncio.TaskGroup() as tasks:
            for i in range(60):
                tasks.create_task(queue.put(group(i), timeout=60))
            tasks.create_task(consume(12))
            tasks.create_task(consume(8))
        assert sorted(got) == list(range(60))

    run(main)


# --- bound ---------------------------------------------------------------------------------------


def test_put_waits_for_room(make: Make) -> None:
    async def main() -> None:
        queue = await make(capacity=2)
        await fill(queue, group(0), group(1))
        third = asyncio.create_task(queue.put(group(2), timeout=9))
        await settle()
        assert not third.done() and (await state_prompts(queue))[1] == [0, 1]
        await queue.get(1, take_all, step=0, timeout=1)
        await third
        assert await state_prompts(queue) == ([(0, [0])], [1, 2])

    run(main)


def test_put_gives_up_at_its_deadline(make: Make) -> None:
    async def main() -> None:
        queue = await make(capacity=1)
        await fill(queue, group(0))
        with pytest.raises(TimeoutError, match="no room for a group in 3 s: 1 of 1 queued"):
            await queue.put(group(1), timeout=3)
        assert now() == 3
        assert await state_prompts(queue) == ([], [0])

    run(main)


def test_a_drop_makes_room(make: Make) -> None:
    async def main() -> None:
        published = [0]
        queue = await make(capacity=1, published=lambda: published[0])
        await fill(queue, group(0, 0))
        waiting = asyncio.create_task(queue.put(group(1, 5), timeout=9))
        published[0] = 5
        assert prompts(await queue.get(1, drop_stale(1), step=0, timeout=9)) == [1]
        await waiting

    run(main)


@pytest.mark.parametrize("n", [0, 3])
def test_a_batch_that_can_never_fit_is_refused(make: Make, n: int) -> None:
    async def main() -> None:
        queue = await make(capacity=2)
        with pytest.raises(ValueError, match=f"batch of {n} groups from a queue of 2"):
            await queue.get(n, take_all, step=0, timeout=1)

    run(main)


def test_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        MemoryQueue(0, lambda: 0)


# --- staleness -----------------------------------------------------------------------------------


def test_time_in_the_queue_counts(make: Make) -> None:
    async def main() -> None:
        published, dropped = [4], []
        queue = await make(
            published=lambda: published[0], on_drop=lambda g, why: dropped.append((g.prompt, why))
        )
        await fill(queue, group(0, 3), group(1, 4), group(2, 3), group(3, 5))
        published[0] = 5  # after every put
        assert prompts(await queue.get(2, drop_stale(1), step=0, timeout=1)) == [1, 3]
        assert dropped == [(0, "lag 2 above 1"), (2, "lag 2 above 1")]
        assert await state_prompts(queue) == ([(0, [1, 3])], [])

    run(main)


def test_a_batch_is_admitted_at_one_published_version(make: Make) -> None:
    async def main() -> None:
        published = [0]
        queue = await make(published=lambda: published[0])
        batch = asyncio.create_task(queue.get(2, drop_stale(1), step=0, timeout=9))
        await settle()
        await fill(queue, group(0, 0))
        await settle()
        published[0] = 2  # group 0 was fine while it was alone
        await fill(queue, group(1, 2), group(2, 2))
        assert prompts(await batch) == [1, 2]

    run(main)


def test_dropping_everything_ends_at_the_deadline(make: Make) -> None:
    async def main() -> None:
        queue = await make(published=lambda: 9)
        await fill(queue, *map(group, range(4)))
        with pytest.raises(TimeoutError, match="0 of 8 queued"):
            await queue.get(1, drop_stale(1), step=0, timeout=7)
        assert now() == 7

    run(main)


def test_younger_groups_wait_for_the_straggler(make: Make) -> None:
    async def main() -> None:
        in_flight = {4}
        queue = await make(published=lambda: 6)
        admit = wait_for_stragglers(2, lambda: in_flight, patience=30.0)
        await fill(queue, group(0, 6), group(1, 5))
        batch = asyncio.create_task(queue.get(2, admit, step=0, timeout=99))
        await settle()
        assert not batch.done()
        in_flight.clear()
        await fill(queue, group(2, 4))
        assert prompts(await batch) == [2, 1]
        assert now() == 0

    run(main)


def test_a_straggler_that_failed_holds_nobody_after_reconsider(make: Make) -> None:
    async def main() -> None:
        in_flight = {4}
        queue = await make(published=lambda: 6)
        await fill(queue, group(0, 6))
        admit = wait_for_stragglers(2, lambda: in_flight, patience=30.0)
        batch = asyncio.create_task(queue.get(1, admit, step=0, timeout=99))
        await settle()
        in_flight.clear()
        queue.reconsider()
        assert prompts(await batch) == [0]
        assert now() == 0

    run(main)


def test_patience_ends_once_per_group_even_over_several_gets(make: Make) -> None:
    async def main() -> None:
        queue = await make(published=lambda: 6)
        await fill(queue, group(0, 6))
        admit = wait_for_stragglers(2, lambda: {4}, patience=30.0)
        with pytest.raises(TimeoutError):
            await queue.get(1, admit, step=0, timeout=20)
        assert prompts(await queue.get(1, admit, step=0, timeout=99)) == [0]
        assert now() == pytest.approx(30)

    run(main)


def test_waiting_never_admits_a_lag_above_tau(make: Make) -> None:
    async def main() -> None:
        published, dropped = [6], []
        queue = await make(
            published=lambda: published[0], on_drop=lambda g, why: dropped.append(why)
        )
        await fill(queue, group(0, 5))
        admit = wait_for_stragglers(2, lambda: {published[0] - 2}, patience=30.0)
        with pytest.raises(TimeoutError):
            await queue.get(1, admit, step=0, timeout=20)
        published[0] = 8  # its lag is 3 before its patience ends
        with pytest.raises(TimeoutError):
            await queue.get(1, admit, step=0, timeout=20)
        assert dropped == ["lag 3 above 2"]

    run(main)


def test_a_policy_may_wait_and_then_drop(make: Make) -> None:
    async def main() -> None:
        dropped = []
        queue = await make(on_drop=lambda g, why: dropped.append((why, now())))
        await fill(queue, group(0))
        with pytest.raises(TimeoutError):
            await queue.get(1, lambda g, v: Wait(4.0, Drop("unfit")), step=0, timeout=9)
        assert dropped == [("unfit", 4.0)]

    run(main)


def test_lag_never_exceeds_tau_at_consumption_under_constant_pushes(make: Make) -> None:
    async def main() -> None:
        tau, published, lags = 2, [0], []
        queue = await make(capacity=6, published=lambda: published[0])

        async def produce() -> None:
            for i in range(200):
                await queue.put(group(i, max(0, published[0] - i % 4)), timeout=60)

        async def train() -> None:
            for step in range(40):
                batch = await queue.get(2, drop_stale(tau), step=step, timeout=60)
                lags.extend(lag(g, published[0]) for g in batch)
                queue.ack(step)
                published[0] += step % 2

        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(produce())
            await tasks.create_task(train())
            producer.cancel()
        assert max(lags) == tau and min(lags) == 0

    run(main)


# --- ack and state -------------------------------------------------------------------------------


def test_ack_is_cumulative(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, *map(group, range(7)))
        for step in range(3):
            await queue.get(2, take_all, step=step, timeout=1)
        assert await state_prompts(queue) == ([(0, [0, 1]), (1, [2, 3]), (2, [4, 5])], [6])
        queue.ack(1)
        assert await state_prompts(queue) == ([(2, [4, 5])], [6])
        queue.ack(0)
        assert await state_prompts(queue) == ([(2, [4, 5])], [6])

    run(main)


def test_resume_repeats_nothing_and_loses_nothing(make: Make) -> None:
    async def main() -> None:
        first = await make()
        sent = [group(i) for i in range(7)]
        await fill(first, *sent)
        await first.get(2, take_all, step=0, timeout=1)
        await first.get(2, take_all, step=1, timeout=1)
        first.ack(0)
        saved = msgpack.packb(await state_of(first))

        second = await make()
        await restore(second, msgpack.unpackb(saved))
        again = await second.get(2, take_all, step=1, timeout=1)
        rest = await second.get(3, take_all, step=2, timeout=1)
        assert prompts(again) == [2, 3] and prompts(rest) == [4, 5, 6]
        assert all(map(same_group, again + rest, sent[2:]))

    run(main)


def test_a_restored_queue_may_be_above_its_bound_but_takes_no_more(make: Make) -> None:
    async def main() -> None:
        first = await make(capacity=2)
        await fill(first, group(0), group(1))
        await first.get(2, take_all, step=0, timeout=1)
        await fill(first, group(2), group(3))
        second = await make(capacity=2)
        await restore(second, await state_of(first))
        with pytest.raises(TimeoutError):
            await second.put(group(4), timeout=1)
        assert prompts(await second.get(2, take_all, step=0, timeout=1)) == [0, 1]

    run(main)


def test_state_has_the_same_keys_when_empty(make: Make) -> None:
    async def main() -> None:
        assert set(await state_of(await make())) == {"unacked", "queued"}

    run(main)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"queued": []},
        {"queued": [], "unacked": [], "more": 1},
        {"queued": 3, "unacked": []},
        {"queued": [{}], "unacked": []},
        {"queued": [], "unacked": [{"step": "0", "groups": []}]},
        {"queued": [], "unacked": [{"step": 1, "groups": []}, {"step": 1, "groups": []}]},
        {"queued": [], "unacked": [[0, []]]},
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(make: Make, state: dict) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, group(0))
        with pytest.raises(ValueError, match=r"queue state|group"):
            await restore(queue, state)
        assert await state_prompts(queue) == ([], [0])

    run(main)


def test_steps_do_not_go_back(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, group(0), group(1))
        await queue.get(1, take_all, step=3, timeout=1)
        with pytest.raises(ValueError, match="update 2 after those for 3"):
            await queue.get(1, take_all, step=2, timeout=1)

    run(main)


# --- durability ----------------------------------------------------------------------------------


def test_put_returns_and_get_serves_only_what_is_durable(make: Make) -> None:
    async def main() -> None:
        written = [asyncio.Event(), asyncio.Event()]
        queue = await make(on_put=lambda g: written[g.prompt].wait())
        puts = [asyncio.create_task(queue.put(group(i), timeout=9)) for i in range(2)]
        await settle()
        written[1].set()
        await settle()
        assert [p.done() for p in puts] == [False, True]
        assert prompts(await queue.get(1, take_all, step=0, timeout=1)) == [1]
        written[0].set()
        await puts[0]
        assert prompts(await queue.get(1, take_all, step=1, timeout=1)) == [0]

    run(main)


def test_order_is_decided_before_durability(make: Make) -> None:
    async def main() -> None:
        written = [asyncio.Event(), asyncio.Event()]
        queue = await make(on_put=lambda g: written[g.prompt].wait())
        async with asyncio.TaskGroup() as tasks:
            for i in range(2):
                tasks.create_task(queue.put(group(i), timeout=9))
            await settle()
            written[1].set()
            await settle()
            written[0].set()
        assert prompts(await queue.get(2, take_all, step=0, timeout=1)) == [0, 1]

    run(main)


def test_groups_being_written_fill_the_queue(make: Make) -> None:
    async def main() -> None:
        never = asyncio.Event()
        queue = await make(capacity=1, on_put=lambda g: never.wait())
        first = asyncio.create_task(queue.put(group(0), timeout=9))
        await settle()
        with pytest.raises(TimeoutError):
            await queue.put(group(1), timeout=1)
        assert await state_prompts(queue) == ([], [0])
        with pytest.raises(TimeoutError):
            await first
        assert await state_prompts(queue) == ([], [])

    run(main)


def test_a_group_that_cannot_be_written_is_not_queued(make: Make) -> None:
    async def main() -> None:
        async def full(_: Group) -> None:
            raise OSError("disk full")

        queue = await make(on_put=full)
        with pytest.raises(OSError, match="disk full"):
            await queue.put(group(0), timeout=1)
        assert await state_prompts(queue) == ([], [])

    run(main)


# --- failure and end -----------------------------------------------------------------------------


def test_fail_wakes_every_waiter_with_the_error(make: Make) -> None:
    async def main() -> None:
        queue = await make(capacity=1)
        getters = [asyncio.create_task(queue.get(1, take_all, step=0, timeout=1e9))]
        await settle()
        blocked = await make(capacity=1)
        await fill(blocked, group(0))
        putters = [asyncio.create_task(blocked.put(group(i), timeout=1e9)) for i in (1, 2)]
        await settle()
        error = RuntimeError("collector died")
        queue.fail(error)
        blocked.fail(error)
        for task in getters + putters:
            with pytest.raises(QueueFailed, match="queue failed: RuntimeError: collector died"):
                await task
        assert now() == 0

    run(main)


def test_after_fail_every_call_says_the_first_error_and_the_state_is_there(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, group(0))
        queue.fail(ValueError("first"))
        queue.fail(ValueError("second"))
        for call in (
            lambda: queue.get(1, take_all, step=0, timeout=1),
            lambda: queue.put(group(1), timeout=1),
        ):
            with pytest.raises(QueueFailed, match="first"):
                await call()
        assert await state_prompts(queue) == ([], [0])

    run(main)


def test_a_closed_queue_serves_what_it_has_then_ends(make: Make) -> None:
    async def main() -> None:
        queue = await make()
        await fill(queue, *map(group, range(3)))
        queue.close()
        assert prompts(await queue.get(2, take_all, step=0, timeout=1e9)) == [0, 1]
        with pytest.raises(QueueClosed, match="closed with 1 of 8 queued"):
            await queue.get(2, take_all, step=1, timeout=1e9)
        with pytest.raises(QueueClosed):
            await queue.put(group(3), timeout=1e9)
        assert now() == 0

    run(main)


def test_close_wakes_waiters(make: Make) -> None:
    async def main() -> None:
        queue, full = await make(), await make(capacity=1)
        await fill(full, group(0))
        tasks = [
            asyncio.create_task(queue.get(1, take_all, step=0, timeout=1e9)),
            asyncio.create_task(full.put(group(1), timeout=1e9)),
        ]
        await settle()
        queue.close()
        full.close()
        for task in tasks:
            with pytest.raises(QueueClosed):
                await task

    run(main)


def test_a_closed_queue_still_waits_out_patience_and_writes(make: Make) -> None:
    async def main() -> None:
        written = asyncio.Event()
        queue = await make(on_put=lambda g: written.wait())
        put = asyncio.create_task(queue.put(group(0), timeout=1e9))
        await settle()
        queue.close()
        batch = asyncio.create_task(
            queue.get(1, lambda g, v: Wait(5.0, Take()), step=0, timeout=1e9)
        )
        await settle()
        assert not batch.done()
        written.set()
        await put
        assert prompts(await batch) == [0]
        assert now() == pytest.approx(5)

    run(main)
