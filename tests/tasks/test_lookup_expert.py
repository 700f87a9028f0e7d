"""Demonstrations: right through the real token path, careless when asked to be, short."""

import asyncio
from collections import defaultdict

import pytest

from rl_jax.gateway.renderer_files import load_renderer
from rl_jax.tasks.base import ToolCall
from rl_jax.tasks.lookup.data import TOKENIZER_DIRECTORY
from rl_jax.tasks.lookup.expert import TIRES_AFTER, demonstration
from rl_jax.tasks.lookup.questions import HOPS
from rl_jax.tasks.lookup.service import LookupTask
from rl_jax.trajectories.types import RolloutKey

HELDOUT = LookupTask("heldout")
RENDERER = load_renderer(TOKENIZER_DIRECTORY)


async def play(index: int, patience: float) -> float:
    """Runs the demonstrator's sampled ids through parse, tools, extend and score.

    Asserts that the token log is what `tokenize` says of the finished conversation.
    """
    prompt = HELDOUT.prompt(index)
    shown = demonstration(HELDOUT.question(index), patience=patience)
    ids, mask = RENDERER.tokenize(shown)
    episode = await HELDOUT.open(prompt, RolloutKey(HELDOUT.name, index, 0))
    messages, log = list(prompt.messages), RENDERER.prompt(prompt.messages)
    while True:
        assert log == ids[: len(log)].tolist() and not mask[len(log) - 1]
        end = len(log)
        while ids[end] not in RENDERER.stop_ids:
            end += 1
        sampled = ids[len(log) : end + 1].tolist()
        assert mask[len(log) : end + 1].all()
        log += sampled
        messages.append(RENDERER.parse(sampled))
        calls = messages[-1].get("tool_calls")
        if not calls:
            break
        (call,) = calls
        answer = await episode.call(ToolCall(call["name"], call["arguments"]))
        new = [{"role": "tool", "content": answer}]
        log += RENDERER.extend(messages, new, closed=True)
        messages += new
    assert messages == list(shown) and log == ids.tolist()
    reward = await episode.score(messages)
    await episode.close()
    return reward


def test_the_expert_solves_every_heldout_question():
    async def all_of_them() -> list[float]:
        return [await play(index, 1.0) for index in range(len(HELDOUT))]

    assert asyncio.run(all_of_them()) == [1.0] * 288


def test_a_demonstrator_without_patience_fails_exactly_the_long_questions():
    async def all_of_them() -> list[float]:
        return [await play(index, 0.0) for index in range(len(HELDOUT))]

    expected = [float(HELDOUT.question(i).hops <= TIRES_AFTER) for i in range(len(HELDOUT))]
    assert asyncio.run(all_of_them()) == expected


def test_patience_is_the_share_of_long_questions_followed_to_their_end():
    long = [q for q in map(LookupTask("train").question, range(6000)) if q.hops >= 4]

    def patient(patience: float, seed: int) -> list[bool]:
        shown = [demonstration(q, patience=patience, seed=seed)[-1]["content"] for q in long]
        return [answer == q.answer for answer, q in zip(shown, long, strict=True)]

    at_a_third = patient(0.3, 0)
    assert sum(at_a_third) / len(long) == pytest.approx(0.3, abs=0.03)
    assert at_a_third == patient(0.3, 0) != patient(0.3, 1)
    # A more patient demonstrator solves more, never others.
    assert all(b for a, b in zip(at_a_third, patient(0.6, 0), strict=True) if a)


def test_tokens_of_a_conversation_by_hops():
    found = defaultdict(set)
    for index in range(len(HELDOUT)):
        ids, mask = RENDERER.tokenize(demonstration(HELDOUT.question(index)))
        found[HELDOUT.question(index).hops].add((len(ids), int(mask.sum())))
    assert found == {hops: {(7 * hops + 5, 3 * hops + 2)} for hops in HOPS}
    assert 7 * max(HOPS) + 5 == 47 <= 64
