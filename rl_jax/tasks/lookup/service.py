"""[H] The lookup task as the orchestrator sees it: prompts, a slow lookup service, a verifier.

There is one tool for each relation, named after it; its argument is the entity's code.
"""

import asyncio
import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

from rl_jax.tasks.base import Message, Prompt, ToolCall
from rl_jax.tasks.lookup.data import load_world
from rl_jax.tasks.lookup.questions import (
    HOPS,
    Question,
    Questions,
    build_questions,
    hash_of,
    opening,
    train_question,
)
from rl_jax.tasks.lookup.world import NOTHING, World, lookup
from rl_jax.trajectories.types import RolloutKey

SIGMA = math.log(10) / NormalDist().inv_cdf(0.99)
"""Of the lognormal latency: its 99th percentile is ten times its median."""
TRAIN_PROMPTS = 4096 * len(HOPS)


def latency_seconds(seed: int, key: RolloutKey, ordinal: int, median: float) -> float:
    """How long call number `ordinal` of rollout `key` takes; lognormal with this median."""
    uniform = (hash_of("latency", seed, *key, ordinal) + 0.5) / 2**64
    # The largest hashes round to 1.0, where the quantile is infinite.
    return median * math.exp(SIGMA * NormalDist().inv_cdf(min(uniform, 1 - 2**-53)))


def is_correct(messages: Sequence[Message], answer: str) -> bool:
    """Whether the conversation ends in an assistant's answer that is exactly `answer`."""
    last = messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls") and last["content"] == answer


@cache
def _load() -> tuple[World, Questions]:
    """Once a process: constant, and shared by the splits."""
    world = load_world()
    return world, build_questions(world)


class LookupEpisode:
    """One rollout; `call` waits as long as (seed, key, number of the call) say."""

    def __init__(
        self, world: World, answer: str, seed: int, key: RolloutKey, median_latency: float
    ) -> None:
        self._world, self._answer = world, answer
        self._seed, self._key, self._median_latency = seed, key, median_latency
        self._calls = 0

    async def call(self, call: ToolCall) -> str:
        ordinal, self._calls = self._calls, self._calls + 1
        if self._median_latency > 0:
            await asyncio.sleep(
                latency_seconds(self._seed, self._key, ordinal, self._median_latency)
            )
        return lookup(self._world, call.name, call.arguments.strip()) or NOTHING

    async def score(self, messages: Sequence[Message]) -> float:
        return float(is_correct(messages, self._answer))

    async def close(self) -> None:
        """Nothing is held."""


class LookupTask:
    """Multi-hop lookup; `seed` sets the training questions and every latency.

    `split` "heldout" has the same questions under every seed, none of which training asks.
    `median_latency` is in seconds; 0 answers at once.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        seed: int = 0,
        median_latency: float = 0.0,
    ) -> None:
        if split not in ("train", "heldout"):
            raise ValueError(f'split is "train" or "heldout", not {split!r}')
        if not (math.isfinite(median_latency) and median_latency >= 0):
            raise ValueError(f"median_latency is a finite number of seconds, not {median_latency}")
        self.name = "lookup" if split == "train" else "lookup-heldout"
        self._world, self._questions = _load()
        self._train = split == "train"
        self._seed, self._median_latency = seed, median_latency

    def __len__(self) -> int:
        return TRAIN_PROMPTS if self._train else len(self._questions.heldout)

    def question(self, index: int) -> Question:
        """The question behind `prompt(index)`, with the way to its answer."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has prompts 0 to {len(self) - 1}, not {index}")
        if self._train:
            return train_question(self._questions, self._seed, index)
        return self._questions.heldout[index]

    def prompt(self, index: int) -> Prompt:
        question = self.question(index)
        payload = {"hops": question.hops, "answer": question.answer}
        return Prompt(index, (opening(question),), payload)

    async def open(self, prompt: Prompt, key: RolloutKey) -> LookupEpisode:
        answer = prompt.payload["answer"]
        return LookupEpisode(self._world, answer, self._seed, key, self._median_latency)

    def label(self, prompt: Prompt) -> str:
        return f"hops={prompt.payload['hops']}"
