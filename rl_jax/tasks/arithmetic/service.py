"""[N] The arithmetic task: one question, one turn, 1 where the answer's last number is right."""

from collections.abc import Sequence
from functools import cache

from rl_jax.tasks.arithmetic.questions import Question, Questions, build_questions, last_number
from rl_jax.tasks.base import Message, Prompt, ToolCall
from rl_jax.trajectories.types import RolloutKey


@cache
def _load() -> Questions:
    """Once a process: constant, and shared by the splits."""
    return build_questions()


class ArithmeticEpisode:
    """One rollout; there are no tools."""

    def __init__(self, answer: int) -> None:
        self._answer = answer

    async def call(self, call: ToolCall) -> str:
        return f"there is no tool {call.name}"

    async def score(self, messages: Sequence[Message]) -> float:
        last = messages[-1]
        return float(last["role"] == "assistant" and last_number(last["content"]) == self._answer)

    async def close(self) -> None:
        """Nothing is held."""


class ArithmeticTask:
    """`split` "heldout" has questions that training never asks; both are the same always."""

    def __init__(self, split: str = "train") -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f'split is "train" or "heldout", not {split!r}')
        self.name = "arithmetic" if split == "train" else "arithmetic-heldout"
        self._questions = _load().train if split == "train" else _load().heldout

    def __len__(self) -> int:
        return len(self._questions)

    def question(self, index: int) -> Question:
        """The question behind `prompt(index)`."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has prompts 0 to {len(self) - 1}, not {index}")
        return self._questions[index]

    def prompt(self, index: int) -> Prompt:
        question = self.question(index)
        payload = {"level": question.level, "answer": question.answer}
        return Prompt(index, ({"role": "user", "content": question.text},), payload)

    async def open(self, prompt: Prompt, key: RolloutKey) -> ArithmeticEpisode:
        del key  # nothing is drawn
        return ArithmeticEpisode(prompt.payload["answer"])

    def label(self, prompt: Prompt) -> str:
        return f"level={prompt.payload['level']}"
