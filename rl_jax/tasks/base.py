"""[N] What a task is to the orchestrator: prompts, tools, a verifier.

A task speaks in chat messages, never in token ids; the gateway's renderer turns messages into ids.
Messages are the OpenAI chat form: {"role": "system" | "user" | "assistant" | "tool", "content":
str} with, on an assistant message, "tool_calls": [{"name": str, "arguments": str}] where
`arguments` is the raw string that the model emitted.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rl_jax.trajectories.types import RolloutKey

Message = Mapping[str, Any]


class ToolCall(NamedTuple):
    name: str
    arguments: str


class TaskError(Exception):
    """The environment broke: a tool failed or died. Ends the rollout as failed, for this reason."""


@dataclass(frozen=True)
class Prompt:
    """One problem; `index` numbers it within its split, `payload` is the task's own, JSON-able."""

    index: int
    messages: tuple[Message, ...]
    payload: Mapping[str, Any]


@runtime_checkable
class Episode(Protocol):
    """One rollout's environment. Closed exactly once, however the rollout ends."""

    def call(self, call: ToolCall) -> Awaitable[str]:
        """The tool's answer; raises TaskError where the tool broke. A wrong call by the policy
        (unknown tool, bad arguments) is an answer that says so, not an error."""
        ...

    def score(self, messages: Sequence[Message]) -> Awaitable[float]:
        """The verifier's reward in [0, 1] for the finished conversation."""
        ...

    def close(self) -> Awaitable[None]: ...


@runtime_checkable
class Task(Protocol):
    """A task family bound to one split of its data; `name` keys random streams and metrics."""

    name: str

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def prompt(self, index: int) -> Prompt:
        """The prompt with this index, the same for the same index always."""
        ...

    def open(self, prompt: Prompt, key: RolloutKey) -> Awaitable[Episode]:
        """A fresh episode; anything random in it (latency) follows from `key` alone."""
        ...

    def label(self, prompt: Prompt) -> str:
        """A short name of the prompt's kind, by which results are broken down (hops, level)."""
        ...


class TaskFamily(NamedTuple):
    """Everything a run needs of a task: what `[task] name` names is a function returning this."""

    train: Task
    heldout: Task
    tokenizer_directory: Path | None
    """As Hugging Face lays it out: tokenizer.json, chat_template.jinja, tokenizer_config.json. None
    of a task in words that any policy may know."""
    demonstration: Callable[[int], Sequence[Message]]
    """A finished conversation for the training prompt with this index, for the warm start."""
    order: Callable[[int], Iterator[int]]
    """(seed) -> the endless order in which training prompts are asked."""
