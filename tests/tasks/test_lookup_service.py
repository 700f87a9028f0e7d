"""The lookup task as the orchestrator meets it: answers, latency, verifier, bad input."""

import asyncio

import numpy as np
import pytest

from rl_jax.tasks.base import Task, ToolCall
from rl_jax.tasks.lookup import service
from rl_jax.tasks.lookup.service import LookupTask, is_correct, latency_seconds
from rl_jax.trajectories.types import RolloutKey

HELDOUT = LookupTask("heldout")
KEY = RolloutKey("lookup", 17, 3)


def typed(task: Task) -> Task:
    """Has the type checker compare LookupTask with the protocol."""
    return task


def answers(*calls: tuple[str, str]) -> list[str]:
    async def ask() -> list[str]:
        episode = await HELDOUT.open(HELDOUT.prompt(0), KEY)
        found = [await episode.call(ToolCall(name, arguments)) for name, arguments in calls]
        await episode.close()
        return found

    return asyncio.run(ask())


def test_tools_answer_and_wrong_calls_get_none():
    assert answers(("country", "FRA"), ("hub", "DE"), ("currency", " JP ")) == ["DE", "FRA", "JPY"]
    wrong = [("teleport", "FRA"), ("country", "XXX"), ("country", "fra"), ("hub", "FRA"), ("", "")]
    wrong += [("border", "KR"), ("country", "FRA MUC"), ("<|user|>", "country FRA")]
    assert answers(*wrong) == ["none"] * len(wrong)


def test_latency_is_lognormal_with_p99_ten_times_the_median():
    seconds = np.array([latency_seconds(1, KEY, ordinal, 0.2) for ordinal in range(20_000)])
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    assert p50 == pytest.approx(0.2, rel=0.03)
    assert p99 / p50 == pytest.approx(10, abs=1)
    logs = np.log(seconds / 0.2) / service.SIGMA
    assert np.mean(np.abs(logs) < 1) == pytest.approx(0.6827, abs=0.01)
    assert abs(np.corrcoef(logs[1:], logs[:-1])[0, 1]) < 0.02


def test_latency_follows_from_seed_key_and_ordinal_alone():
    def draw(seed: int = 0, key: RolloutKey = KEY, ordinal: int = 0) -> float:
        return latency_seconds(seed, key, ordinal, 1.0)

    others = [draw(seed=1), draw(ordinal=1), draw(key=KEY._replace(task="other"))]
    others += [draw(key=KEY._replace(prompt=18)), draw(key=KEY._replace(sample=4))]
    others += [draw(key=KEY._replace(attempt=1))]
    assert len({draw(), *others}) == 7
    assert draw() == draw() == pytest.approx(0.7597220177067553, rel=1e-12)
    assert latency_seconds(0, KEY, 0, 3.0) == pytest.approx(3 * draw())


@pytest.mark.parametrize("hash_value", [0, 2**64 - 1])
def test_latency_is_finite_at_both_ends_of_the_hash(monkeypatch, hash_value: int):
    monkeypatch.setattr(service, "hash_of", lambda *parts: hash_value)
    assert 0 < latency_seconds(0, KEY, 0, 1.0) < 1e5


def test_calls_wait_as_drawn_and_not_at_all_without_latency(monkeypatch):
    slept: list[float] = []

    async def record(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(service.asyncio, "sleep", record)

    async def three_calls(median: float) -> None:
        task = LookupTask("train", seed=5, median_latency=median)
        episode = await task.open(task.prompt(0), KEY)
        for entity in ("FRA", "JFK", "XXX"):
            await episode.call(ToolCall("country", entity))

    asyncio.run(three_calls(0.0))
    assert slept == []
    asyncio.run(three_calls(0.3))
    assert slept == [latency_seconds(5, KEY, ordinal, 0.3) for ordinal in range(3)]


def test_only_an_exact_last_answer_of_the_assistant_counts():
    user, tool = {"role": "user", "content": "FRA country"}, {"role": "tool", "content": "DE"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "x", "arguments": "DE"}]}

    def says(content: str) -> dict[str, str]:
        return {"role": "assistant", "content": content}

    assert is_correct([user, call, tool, says("DE")], "DE")
    assert is_correct([user, says("DE")], "DE")
    for end in (says("FR"), says("DE FR"), says("de"), says(""), says("DE<|call|>"), tool, user):
        assert not is_correct([user, call, tool, end], "DE")
    assert not is_correct([user, says("DE"), call, tool], "DE")
    assert not is_correct([user, call | {"content": "DE"}], "DE")


def test_prompts_labels_and_splits():
    train = typed(LookupTask("train", seed=2))
    heldout = typed(HELDOUT)
    assert (train.name, heldout.name) == ("lookup", "lookup-heldout")
    assert len(train) == 24_576 and len(heldout) == 288
    for task in (train, heldout):
        prompt = task.prompt(8)
        assert prompt == task.prompt(8) and prompt.index == 8
        assert task.label(prompt) == "hops=3"
        (message,) = prompt.messages
        assert message["role"] == "user" and len(message["content"].split()) == 4
    asked = {heldout.prompt(index).messages[0]["content"] for index in range(288)}
    assert len(asked) == 288
    assert not asked & {train.prompt(index).messages[0]["content"] for index in range(3000)}
    other_seed = LookupTask("heldout", seed=9)
    assert all(other_seed.prompt(index) == heldout.prompt(index) for index in range(288))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="split is"):
        LookupTask("test")
    for median in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="median_latency is a finite number of seconds"):
            LookupTask("heldout", median_latency=median)
    for index in (-1, 288):
        with pytest.raises(IndexError, match="lookup-heldout has prompts 0 to 287"):
            HELDOUT.prompt(index)
