"""[N] What passes between a rollout's session and a sampler: token ids in, token ids out."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from rl_jax.trajectories.types import RolloutKey, Segment


class Finish(StrEnum):
    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """The request's or the context's limit was reached."""


class Completion(NamedTuple):
    """The sampled tokens of one request, with what the trainer must know of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the distribution really sampled from."""
    raw_logprobs: tuple[float, ...]
    """Under temperature 1."""
    versions: tuple[int, ...]
    finish: Finish
    choices: np.ndarray | None = None
    """uint8 or uint16[n, layers, k]: the experts of the sequence's tokens that follow those of its
    completions before, up to the last but one; None where the sampler records none."""


@dataclass(frozen=True)
class Request:
    """Extend a sequence by `new_tokens`, then sample up to `max_new_tokens`."""

    new_tokens: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    training: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0 or (self.training and self.temperature == 0):
            least = "above 0 in a training request" if self.training else "at least 0"
            raise ValueError(f"temperature must be {least}, got {self.temperature}")
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p must be 1.0, got {self.top_p}: a truncated distribution biases the "
                "importance ratio by the mass it keeps; requests take temperature only"
            )


class RequestFailed(Exception):
    """The sampler gave this request up (its logits were not finite); others are not affected."""


class SamplerLost(Exception):
    """The sampler went away: the rollout ended by no fault of its own and is issued again."""


@runtime_checkable
class SamplerClient(Protocol):
    """Sequences that grow request by request, each keeping its cache between requests."""

    async def open(self, key: RolloutKey) -> int:
        """A new sequence; waits while the pool has no pages for it."""
        ...

    async def generate(self, sequence: int, request: Request) -> Completion:
        """Raises RequestFailed where the request was given up; the sequence takes no other then.

        Where the context has no room for the new tokens and one more, none is added and the
        completion is empty.
        """
        ...

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        """Which version computed the cache of which tokens, in the order it happened."""
        ...

    async def close(self, sequence: int) -> None:
        """Releases the sequence's pages; idempotent."""
        ...
