"""One rollout: what ends it, as what, and that the episode is closed once whatever happens."""

import asyncio
from collections.abc import Sequence

import pytest

from rl_jax.gateway.protocol import RequestFailed
from rl_jax.orchestrator.rollout import RolloutLimits, run_rollout
from rl_jax.tasks.base import Message, TaskError, ToolCall
from rl_jax.trajectories.types import RolloutKey, Status, Trajectory
from tests.fakes.client import FakeSampler, Turn
from tests.fakes.task import RENDERER, FakeTask, ids
from tests.queues.clock import now, run

KEY = RolloutKey("fake", 4, 2)
LIMITS = RolloutLimits(
    temperature=1.0, max_new_tokens=12, max_turns=3, tool_deadline_s=5.0, request_deadline_s=60.0
)
CALL, ANSWER = ids(" near KBP<|call|>"), ids(" WAW<|end|>")


def saying(*turns: Turn) -> FakeSampler:
    return FakeSampler(lambda key: iter(turns))


async def rollout(task: FakeTask, sampler: FakeSampler) -> Trajectory:
    return await run_rollout(task, task.prompt(4), KEY, sampler, RENDERER, LIMITS)


def outcome(task: FakeTask, *turns: Turn) -> tuple[Trajectory, float]:
    """What the rollout left, and the seconds it took; it closed what it opened, once."""

    async def main() -> tuple[Trajectory, float]:
        return await rollout(task, sampler), now()

    sampler = saying(*turns)
    ended = run(main)
    assert sampler.closed == [0]
    return ended


def ended(of: Trajectory) -> tuple[Status, float | None, str, int]:
    return of.status, of.reward, of.reason, of.turns


async def never(*_: object) -> None:
    await asyncio.Event().wait()


# --- a conversation ------------------------------------------------------------------------------


def test_a_call_an_answer_and_a_score() -> None:
    heard: list[ToolCall] = []
    scored: list[Sequence[Message]] = []

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        heard.append(call)
        return "WAW"

    async def score(key: RolloutKey, messages: Sequence[Message]) -> float:
        scored.append(messages)
        return 0.75

    task = FakeTask(on_call=tool, on_score=score)
    got, _ = outcome(task, CALL, ANSWER)
    assert ended(got) == (Status.COMPLETED, 0.75, "", 2)
    assert heard == [ToolCall("near", "KBP")]
    assert [m["role"] for m in scored[0]] == ["user", "assistant", "tool", "assistant"]
    assert scored[0][-1]["content"] == "WAW"
    assert task.closed == [KEY]
    text = RENDERER.tokenizer.decode(got.tokens.tolist(), skip_special_tokens=False)
    assert text == (
        "<|user|> KBP near<|assistant|> near KBP<|call|><|tool|> WAW<|assistant|> WAW<|end|>"
    )
    assert got.tokens[got.loss_mask].tolist() == [*CALL, *ANSWER]


def test_sampled_ids_are_kept_even_where_encoding_their_text_gives_others() -> None:
    letters = tuple(i for c in (" ", "W", "A", "W", "<|end|>") for i in ids(c))
    assert letters != ANSWER
    got, _ = outcome(FakeTask(), letters)
    assert got.tokens[got.loss_mask].tolist() == list(letters)


# --- limits --------------------------------------------------------------------------------------


def test_the_turn_limit_truncates() -> None:
    task = FakeTask()
    got, _ = outcome(task, CALL, CALL, CALL, ANSWER)
    assert ended(got) == (Status.TRUNCATED, 0.0, "turn limit", 3)
    assert task.closed == [KEY]


def test_after_the_last_turn_nothing_follows_what_was_sampled() -> None:
    """A last answer that nobody reads could exceed the context, and so a row of the trainer."""
    got, _ = outcome(FakeTask(), CALL, CALL, CALL, ANSWER)
    assert got.tokens[-len(CALL) :].tolist() == list(CALL) and got.loss_mask[-1]


def test_the_token_limit_truncates() -> None:
    got, _ = outcome(FakeTask(), CALL, ids(" near KBP"))
    assert ended(got) == (Status.TRUNCATED, 0.0, "token limit", 2)
    assert got.tokens[-len(ids(" near KBP")) :].tolist() == list(ids(" near KBP"))


def test_a_tool_answer_that_the_context_has_no_room_for_truncates_before_it() -> None:
    got, _ = outcome(FakeTask(), CALL, ())
    assert ended(got) == (Status.TRUNCATED, 0.0, "token limit", 2)
    assert got.tokens[-len(CALL) :].tolist() == list(CALL)


# --- an environment that breaks ------------------------------------------------------------------


async def breaks(*_: object) -> None:
    raise TaskError("connection reset")


@pytest.mark.parametrize(
    ("task", "reason", "turns"),
    [
        (FakeTask(on_open=breaks), "open: connection reset", 0),
        (FakeTask(on_call=breaks), "near: connection reset", 1),
        (FakeTask(on_score=breaks), "verifier: connection reset", 2),
        (FakeTask(on_close=breaks), "close: connection reset", 2),
    ],
)
def test_what_breaks_fails_the_rollout_with_its_reason(
    task: FakeTask, reason: str, turns: int
) -> None:
    if turns == 2:
        got, _ = outcome(task, CALL, ANSWER)
    else:
        got, _ = outcome(task, CALL)
    assert ended(got) == (Status.FAILED, None, reason, turns)
    assert task.closed == ([KEY] if turns else [])


@pytest.mark.parametrize(
    ("task", "reason", "turns"),
    [
        (FakeTask(on_open=never), "open: no answer in 5 s", 0),
        (FakeTask(on_call=never), "near: no answer in 5 s", 1),
        (FakeTask(on_score=never), "verifier: no answer in 5 s", 2),
        (FakeTask(on_close=never), "close: no answer in 5 s", 2),
    ],
)
def test_what_never_answers_fails_the_rollout_at_its_deadline(
    task: FakeTask, reason: str, turns: int
) -> None:
    got, seconds = outcome(task, CALL, ANSWER)
    assert ended(got) == (Status.FAILED, None, reason, turns)
    assert seconds == 5.0
    assert task.closed == ([KEY] if turns else [])


def test_a_slow_tool_within_its_deadline_is_no_failure() -> None:
    async def slow(key: RolloutKey, call: ToolCall) -> str:
        await asyncio.sleep(4.9)
        return "WAW"

    got, seconds = outcome(FakeTask(on_call=slow), CALL, CALL, ANSWER)
    assert got.status is Status.COMPLETED
    assert seconds == 9.8


def test_the_tools_own_words_for_its_timeout_are_kept() -> None:
    async def late(*_: object) -> str:
        raise TimeoutError("no connection in 1 s")

    got, _ = outcome(FakeTask(on_call=late), CALL)
    assert got.reason == "near: no connection in 1 s"


def test_a_request_that_the_sampler_gave_up_fails_the_rollout() -> None:
    task = FakeTask()
    got, _ = outcome(task, CALL, RequestFailed("logits not finite: x"))
    assert ended(got) == (Status.FAILED, None, "logits not finite: x", 2)
    assert task.closed == [KEY]


# --- faults of the program -----------------------------------------------------------------------


async def bug(*_: object) -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    "task", [FakeTask(on_open=bug), FakeTask(on_call=bug), FakeTask(on_score=bug)]
)
def test_any_other_exception_passes_through_and_everything_is_closed(task: FakeTask) -> None:
    sampler = saying(CALL, ANSWER)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(lambda: rollout(task, sampler))
    assert sampler.closed == [0]
    assert task.closed == ([] if task.on_open is bug else [KEY])


def test_a_sampler_that_never_answers_is_a_fault_of_the_program() -> None:
    class Silent(FakeSampler):
        async def generate(self, *_: object) -> None:
            await never()

    sampler, task = Silent(lambda key: iter(())), FakeTask()
    with pytest.raises(TimeoutError, match="the sampler has not answered a request in 60 s"):
        run(lambda: rollout(task, sampler))
    assert (sampler.closed, task.closed) == ([0], [KEY])


def test_a_cancelled_rollout_closes_its_episode_and_its_sequence() -> None:
    async def main() -> None:
        own = asyncio.create_task(rollout(task, sampler))
        await asyncio.sleep(1)
        own.cancel()
        await asyncio.wait([own])
        assert own.cancelled()
        assert now() == 1.0

    task, sampler = FakeTask(on_call=never), saying(CALL)
    run(main)
    assert (sampler.closed, task.closed) == ([0], [KEY])
