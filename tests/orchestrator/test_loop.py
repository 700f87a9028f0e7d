"""The orchestrator's loop over a scripted sampler: groups on the queue, pacing, faults."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import pytest

from rl_jax.gateway.protocol import SamplerLost
from rl_jax.orchestrator.loop import Orchestrator, evaluate, solve_rate
from rl_jax.orchestrator.rollout import RolloutLimits
from rl_jax.orchestrator.state import Discard, Limits, Resume
from rl_jax.queues.memory import MemoryQueue
from rl_jax.staleness import Take
from rl_jax.tasks.base import TaskError, ToolCall
from rl_jax.trajectories.types import Group, RolloutKey, Status, Trajectory
from tests.fakes.client import FakeSampler, Turn
from tests.fakes.task import RENDERER, FakeTask, ids
from tests.queues.clock import now, run, settle
from tests.trajectories.build import trajectory

CALL, ANSWER = ids(" near KBP<|call|>"), ids(" WAW<|end|>")
ROLLOUT = RolloutLimits(1.0, 12, 3, tool_deadline_s=5.0, request_deadline_s=60.0)

SYNCHRONOUS = Limits(group_size=2, groups_per_update=2, in_flight=8, ahead=0)


class Setup:
    """An orchestrator and what it told."""

    def __init__(
        self,
        task: FakeTask,
        *,
        limits: Limits = SYNCHRONOUS,
        capacity: int = 8,
        on_put: Callable[[Group], Awaitable[object]] | None = None,
        script: Callable[[RolloutKey], Iterator[Turn]] = lambda key: iter((CALL, ANSWER)),
        resume: Resume | None = None,
    ) -> None:
        self.ended: list[Trajectory] = []
        self.discarded: list[Discard] = []
        self.started: list[RolloutKey] = []
        self.lost: list[tuple[RolloutKey, str]] = []
        self.version = 0
        self.sampler = FakeSampler(script, lambda: self.version)
        self.queue = MemoryQueue(capacity, lambda: self.version, on_put)
        self.orchestrator = Orchestrator(
            task,
            count(100),
            self.sampler,
            RENDERER,
            self.queue,
            limits,
            ROLLOUT,
            put_timeout=30.0,
            on_rollout=self._ended,
            on_discard=self._discarded,
            on_started=self.started.append,
            on_lost=lambda key, reason: self.lost.append((key, reason)),
            resume=resume,
        )

    async def _ended(self, trajectory: Trajectory) -> None:
        self.ended.append(trajectory)

    async def _discarded(self, discard: Discard) -> None:
        self.discarded.append(discard)

    async def take(self, n: int, step: int) -> list[Group]:
        return await self.queue.get(n, lambda group, version: Take(), step=step, timeout=100.0)


def beside(setup: Setup, main: Callable[[], Awaitable[None]]) -> None:
    """`main` while the loop runs; a fault of the loop is raised."""

    async def whole() -> None:
        async with asyncio.TaskGroup() as group:
            loop = group.create_task(setup.orchestrator.run())
            await main()
            loop.cancel()

    run(whole)


def prompts(groups: list[Group]) -> list[int]:
    return sorted(g.prompt for g in groups)


def test_groups_come_complete_and_only_as_fast_as_they_are_settled() -> None:
    async def main() -> None:
        first = await setup.take(2, 1)
        await settle()
        assert (prompts(first), len(setup.ended), len(setup.queue)) == ([0, 1], 4, 0)
        assert setup.orchestrator.state.running == 0
        setup.orchestrator.settled([0, 1])
        second = await setup.take(2, 2)
        assert prompts(second) == [2, 3]
        for group in (*first, *second):
            assert [m.key for m in group.members] == [
                RolloutKey("fake", group.prompt, sample) for sample in (0, 1)
            ]
            assert [m.reward for m in group.members] == [1.0, 0.0]

    setup = Setup(FakeTask())
    beside(setup, main)


def test_prompts_are_those_of_the_given_order() -> None:
    """The key counts groups; the task is asked for what the order says."""
    asked: list[int] = []

    class Listening(FakeTask):
        def prompt(self, index: int):
            asked.append(index)
            return super().prompt(index)

    async def main() -> None:
        await setup.take(2, 1)

    setup = Setup(Listening())
    beside(setup, main)
    assert asked == [100, 101]


def test_a_broken_tool_costs_its_rollouts_and_their_groups_only() -> None:
    async def tool(key: RolloutKey, call: ToolCall) -> str:
        if key.prompt == 0 or (key.prompt, key.sample) == (1, 2):
            raise TaskError("gone")
        return "WAW"

    async def main() -> None:
        (group,) = await setup.take(1, 1)
        assert group.prompt == 1
        assert [(m.key.sample, m.copy_of) for m in group.members] == [(0, None), (1, None), (0, 0)]
        assert group.failures == ((2, "near: gone"),)

    setup = Setup(FakeTask(on_call=tool), limits=Limits(3, 1, 3, 0))
    beside(setup, main)
    assert setup.discarded == [Discard("fake", 0, "0 of 3 rollouts valid: near: gone", ())]
    failed = [t.key for t in setup.ended if t.status is Status.FAILED]
    assert len(failed) == 4 and len(setup.ended) == 6


def test_the_oldest_version_of_each_group_under_way() -> None:
    """Group 0 waits for its tool after one turn under 0; group 1 began under 3."""
    gate = asyncio.Event()

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        await gate.wait()
        return "WAW"

    async def main() -> None:
        await settle()
        assert list(setup.orchestrator.oldest_in_flight()) == [0, 0]
        setup.version = 3
        gate.set()
        await setup.take(2, 1)
        gate.clear()
        assert list(setup.orchestrator.oldest_in_flight()) == []
        setup.orchestrator.settled([0])
        await settle()
        assert list(setup.orchestrator.oldest_in_flight()) == [3]
        gate.set()

    setup = Setup(FakeTask(on_call=tool))
    beside(setup, main)


def test_a_group_is_in_flight_until_it_is_on_the_queue() -> None:
    """Or the trainer would go on without a straggler while it is made durable."""
    durable = asyncio.Event()

    async def on_put(group: Group) -> None:
        await durable.wait()

    async def main() -> None:
        await settle()
        assert len(setup.ended) == 2 and setup.orchestrator.state.running == 0
        assert list(setup.orchestrator.oldest_in_flight()) == [0]
        durable.set()
        await setup.take(1, 1)
        await settle()
        assert list(setup.orchestrator.oldest_in_flight()) == []

    setup = Setup(FakeTask(), limits=Limits(2, 1, 2, 0), on_put=on_put)
    beside(setup, main)


def test_a_bug_in_a_task_ends_the_loop_with_it() -> None:
    async def tool(key: RolloutKey, call: ToolCall) -> str:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        await setup.take(1, 1)

    setup = Setup(FakeTask(on_call=tool))
    with pytest.raises(ExceptionGroup) as caught:
        beside(setup, main)
    assert caught.group_contains(ZeroDivisionError, match="a bug")
    assert sorted(setup.sampler.closed) == list(range(len(setup.sampler.opened)))


def test_a_queue_that_never_makes_a_group_durable_ends_the_loop() -> None:
    async def never(group: Group) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await setup.take(1, 1)

    setup = Setup(FakeTask(), on_put=never)
    with pytest.raises(ExceptionGroup) as caught:
        beside(setup, main)
    assert caught.group_contains(TimeoutError)


def test_cancelling_the_loop_closes_every_rollout() -> None:
    async def forever(key: RolloutKey, call: ToolCall) -> str:
        return await asyncio.Future()

    async def main() -> None:
        await settle()
        assert setup.orchestrator.state.running == 4

    setup = Setup(task := FakeTask(on_call=forever))
    beside(setup, main)
    assert sorted(setup.sampler.closed) == [0, 1, 2, 3]
    assert len(task.closed) == 4


# --- pacing, pushes, cancelling ------------------------------------------------------------------


def test_a_backlog_larger_than_the_concurrency_completes() -> None:
    """32 groups of 2 over 8 rollouts at once, each of which waits for its tool."""
    running = most = 0

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(1 + key.prompt % 3)
        running -= 1
        return "WAW"

    async def main() -> None:
        assert prompts(await setup.take(32, 1)) == list(range(32))

    limits = Limits(group_size=2, groups_per_update=32, in_flight=8, ahead=0)
    setup = Setup(FakeTask(on_call=tool), limits=limits, capacity=32)
    beside(setup, main)
    assert most == 8 and len(setup.ended) == 64


def test_a_push_goes_through_while_a_rollout_hangs_in_its_tool() -> None:
    """Group 0 never ends; each batch is of the version pushed before it."""

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        if key.prompt == 0:
            await asyncio.Future()
        return "WAW"

    async def main() -> None:
        for step in (1, 2, 3):
            batch = await setup.take(1, step)
            assert [(g.prompt, g.oldest_version) for g in batch] == [(step, step - 1)]
            setup.version = step
            setup.orchestrator.published(step)
            setup.orchestrator.settled(prompts(batch))
        await setup.take(1, 4)
        state = setup.orchestrator.state
        assert state.published == 3 and state.open.keys() == {0}
        assert state.unsettled == {0: 0, 4: 3}, "each with the version it started under"

    setup = Setup(FakeTask(on_call=tool), limits=Limits(2, 1, in_flight=8, ahead=1))
    beside(setup, main)


def test_over_sampled_groups_end_with_their_batch() -> None:
    """Of four groups 1 and 3 answer; 0 and 2 hang in their tools and are cancelled there."""

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        if key.prompt in (0, 2):
            await asyncio.Future()
        return "WAW"

    async def main() -> None:
        assert prompts(await setup.take(2, 1)) == [1, 3]
        await settle()
        assert setup.orchestrator.state.running == 4
        setup.orchestrator.settled([1, 3])
        assert prompts(await setup.take(2, 2)) == [4, 5]

    task = FakeTask(on_call=tool)
    setup = Setup(task, limits=SYNCHRONOUS._replace(over_sample=1.0, in_flight=16))
    beside(setup, main)
    assert setup.discarded == [Discard("fake", p, "over-sampled", ()) for p in (0, 2)]
    assert len(task.closed) == len(setup.sampler.closed) == len(setup.started)
    assert {t.key.prompt for t in setup.ended} == {1, 3, 4, 5, 6, 7}


def test_a_broken_environment_is_not_asked_again_at_once() -> None:
    asked: list[float] = []

    async def broken(key: RolloutKey) -> None:
        if key.sample == 0:
            asked.append(now())
        if key.prompt < 3:
            raise TaskError("gone")

    async def main() -> None:
        assert prompts(await setup.take(1, 1)) == [3]

    limits = Limits(2, 1, 2, 0, retry_pause_s=1.0)
    setup = Setup(FakeTask(on_open=broken), limits=limits)
    beside(setup, main)
    assert asked == [0.0, 1.0, 3.0, 7.0]


# --- a sampler that goes away, an orchestrator that goes on --------------------------------------


def dying(*dead: tuple[int, int, int]) -> Callable[[RolloutKey], Iterator[Turn]]:
    """The sampler goes away in the second turn of these (prompt, sample, attempt)."""

    def script(key: RolloutKey) -> Iterator[Turn]:
        yield CALL
        yield SamplerLost("replica 1 is gone") if key[1:] in dead else ANSWER

    return script


def test_a_rollout_whose_sampler_went_away_is_issued_again() -> None:
    async def main() -> None:
        untouched, again = await setup.take(2, 1)
        assert [m.key[1:] for m in untouched.members] == [(1, 0, 0), (1, 1, 0)]
        assert [m.key[1:] for m in again.members] == [(0, 0, 2), (0, 1, 0)]

    task = FakeTask()
    setup = Setup(task, script=dying((0, 0, 0), (0, 0, 1)))
    beside(setup, main)
    lost = [RolloutKey("fake", 0, 0, attempt) for attempt in (0, 1)]
    assert setup.lost == [(key, "replica 1 is gone") for key in lost]
    assert setup.started[4:6] == [key._replace(attempt=key.attempt + 1) for key in lost]
    assert len(task.closed) == len(setup.sampler.closed) == 6
    assert not set(lost) & {t.key for t in setup.ended}


def test_a_lost_rollout_is_no_longer_in_flight() -> None:
    """Group 0 sampled under 0 and was lost; its second attempt hangs before its first token."""
    gate = asyncio.Event()

    async def opened(key: RolloutKey) -> None:
        if key.attempt:
            await gate.wait()

    async def main() -> None:
        await settle()
        assert list(setup.orchestrator.oldest_in_flight()) == []
        gate.set()
        await setup.take(1, 1)

    script = dying((0, 0, 0), (0, 1, 0))
    setup = Setup(FakeTask(on_open=opened), limits=Limits(2, 1, 2, 0), script=script)
    beside(setup, main)


def test_it_goes_on_where_another_stopped() -> None:
    """Of the order 100, 101, ...: 1 and 3 again, 4 and 5 new; 0 was trained, 2 is on the queue."""
    asked: list[int] = []

    class Listening(FakeTask):
        def prompt(self, index: int):
            asked.append(index)
            return super().prompt(index)

    resume = Resume(4, ((1, 1), (3, 2)), ((2, 0),), started=4)

    async def main() -> None:
        assert prompts(await setup.take(2, 1)) == [1, 3]
        setup.orchestrator.settled([1, 2])
        assert prompts(await setup.take(2, 2)) == [4, 5]

    setup = Setup(Listening(), limits=SYNCHRONOUS._replace(ahead=0.5), resume=resume)
    beside(setup, main)
    assert asked == [101, 103, 104, 105]
    assert [key[1:] for key in setup.started if key.sample == 0] == [
        (1, 0, 1), (3, 0, 2), (4, 0, 0), (5, 0, 0),
    ]  # fmt: skip


# --- evaluation ----------------------------------------------------------------------------------


def test_evaluation_asks_each_prompt_once_within_its_bound_and_keeps_the_order() -> None:
    running = most = 0

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(10 - key.prompt)
        running -= 1
        if key.prompt == 3:
            raise TaskError("gone")
        return "WAW"

    async def score(key: RolloutKey, messages: object) -> float:
        return float(key.prompt in (0, 4))

    async def main() -> None:
        task = FakeTask(on_call=tool, on_score=score)
        sampler = FakeSampler(lambda key: iter((CALL, ANSWER)))
        limits = ROLLOUT._replace(temperature=0.0, training=False, tool_deadline_s=60.0)
        heard: list[int] = []
        got = await evaluate(
            task,
            range(5),
            sampler,
            RENDERER,
            limits,
            at_once=3,
            on_done=lambda t: heard.append(t.key.prompt),
        )
        assert [(p.index, t.key) for p, t in got] == [
            (i, RolloutKey("fake", i, 0)) for i in range(5)
        ]
        assert most == 3
        assert sorted(heard) == [0, 1, 2, 3, 4] and heard != sorted(heard)
        done = [t for _, t in got]
        assert done[3].status is Status.FAILED
        assert solve_rate(done) == 2 / 4
        assert all(not r.training and r.temperature == 0.0 for _, r in sampler.requests)

    run(main)


def test_evaluation_begins_a_lost_rollout_again_five_times_at_most() -> None:
    async def main() -> None:
        dead = [(0, 0, 0), (0, 0, 1), *((1, 0, attempt) for attempt in range(9))]
        sampler = FakeSampler(dying(*dead))
        got = await evaluate(FakeTask(), range(3), sampler, RENDERER, ROLLOUT, at_once=1)
        assert [p.index for p, _ in got] == [0, 1, 2]
        done = [t for _, t in got]
        assert [(t.key.prompt, t.key.attempt) for t in done] == [(0, 2), (1, 4), (2, 0)]
        assert (done[1].status, done[1].reason) == (Status.FAILED, "sampler lost 5 times")
        assert solve_rate(done) == 1.0
        assert len(sampler.opened) == 3 + 5 + 1

    run(main)


def test_solve_rate_is_over_what_the_environment_did_not_break() -> None:
    assert solve_rate([]) == 0.0
    assert solve_rate([trajectory(0, None)]) == 0.0
    assert solve_rate([trajectory(0, 1.0), trajectory(1, None), trajectory(2, 0.5)]) == 0.75
