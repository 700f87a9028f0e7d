"""A task whose tool, verifier and sandbox do what a test tells them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rl_jax.gateway.renderer_files import load_renderer
from rl_jax.tasks.base import Message, Prompt, ToolCall
from rl_jax.tasks.lookup.data import TOKENIZER_DIRECTORY
from rl_jax.trajectories.types import RolloutKey

RENDERER = load_renderer(TOKENIZER_DIRECTORY)


def ids(text: str) -> tuple[int, ...]:
    """The tokens of what a policy says; " near KBP<|call|>" calls, " WAW<|end|>" answers."""
    return tuple(RENDERER.tokenizer.encode(text, add_special_tokens=False).ids)


async def _nothing(key: RolloutKey) -> None:
    pass


async def _tool(key: RolloutKey, call: ToolCall) -> str:
    return "WAW"


async def _even_samples(key: RolloutKey, messages: Sequence[Message]) -> float:
    return float(key.sample % 2 == 0)


@dataclass
class FakeTask:
    """Every hook gets the rollout's key first."""

    name: str = "fake"
    size: int = 1000
    on_open: Callable[[RolloutKey], Awaitable[None]] = _nothing
    on_call: Callable[[RolloutKey, ToolCall], Awaitable[str]] = _tool
    on_score: Callable[[RolloutKey, Sequence[Message]], Awaitable[float]] = _even_samples
    on_close: Callable[[RolloutKey], Awaitable[None]] = _nothing
    closed: list[RolloutKey] = field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, ({"role": "user", "content": "KBP near"},), {"index": index})

    async def open(self, prompt: Prompt, key: RolloutKey) -> "FakeEpisode":
        await self.on_open(key)
        return FakeEpisode(self, key)

    def label(self, prompt: Prompt) -> str:
        return f"parity={prompt.index % 2}"


@dataclass
class FakeEpisode:
    task: FakeTask
    key: RolloutKey

    async def call(self, call: ToolCall) -> str:
        return await self.task.on_call(self.key, call)

    async def score(self, messages: Sequence[Message]) -> float:
        return await self.task.on_score(self.key, messages)

    async def close(self) -> None:
        self.task.closed.append(self.key)
        await self.task.on_close(self.key)
