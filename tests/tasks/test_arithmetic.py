"""The arithmetic task: answers against Python's own, splits apart, what counts as the number."""

import asyncio

import pytest

from rl_jax.tasks.arithmetic.family import family
from rl_jax.tasks.arithmetic.questions import LEVELS, SIGNS, build_questions, last_number
from rl_jax.tasks.arithmetic.service import ArithmeticTask
from rl_jax.tasks.base import Task
from rl_jax.trajectories.types import RolloutKey

FAMILY = family(seed=0, latency_median_s=0.0, patience=1.0)
KEY = RolloutKey("arithmetic", 0, 0)


def score(task: Task, index: int, said: str) -> float:
    async def play() -> float:
        prompt = task.prompt(index)
        episode = await task.open(prompt, KEY)
        return await episode.score([*prompt.messages, {"role": "assistant", "content": said}])

    return asyncio.run(play())


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_right_number_and_no_other_is_rewarded(split: str) -> None:
    task = ArithmeticTask(split)
    for index in range(0, len(task), 41):
        asked = task.prompt(index).messages[0]["content"]
        asked = asked.removeprefix("What is ").partition("?")[0]
        right = eval(asked)
        assert score(task, index, f"{asked} = {right}.") == 1.0
        assert score(task, index, f"{right} or {right + 1}") == 0.0
        assert score(task, index, "I do not know") == 0.0


def test_the_splits_share_no_question_and_hold_every_one() -> None:
    made = build_questions()
    train, heldout = ({q.text for q in split} for split in made)
    assert not train & heldout
    assert len(train) + len(heldout) == sum(len(a) * len(b) for _, a, b in LEVELS) * len(SIGNS)
    assert {(q.level, q.sign) for q in made.heldout[:12]} == {
        (level, sign) for level, _, _ in LEVELS for sign in SIGNS
    }
    assert "What is 7 + 5? Answer with the number only." in train | heldout


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12.", 12), ("5-12=-7", -7), ("5 - 12 is \N{MINUS SIGN}7", -7), ("10-3", 3),
        ("It is 1,234, I think", 1234), ("12.5", 12.5), ("**12**", 12), ("none", None),
    ],
)  # fmt: skip
def test_the_last_number_of_an_answer(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_a_demonstration_is_right_and_a_call_is_answered() -> None:
    for index in (0, 7, len(FAMILY.train) - 1):
        assert score(FAMILY.train, index, FAMILY.demonstration(index)[-1]["content"]) == 1.0
    assert sorted({FAMILY.train.label(FAMILY.train.prompt(i)) for i in range(0, 500, 9)}) == [
        "level=1", "level=2",
    ]  # fmt: skip
    order = FAMILY.order(3)
    assert len({next(order) for _ in range(len(FAMILY.train))}) == len(FAMILY.train)


def test_bad_names_are_named() -> None:
    with pytest.raises(ValueError, match=r'split is "train" or "heldout", not .test'):
        ArithmeticTask("test")
    with pytest.raises(IndexError, match="arithmetic-heldout has prompts 0 to"):
        ArithmeticTask("heldout").prompt(10**6)
