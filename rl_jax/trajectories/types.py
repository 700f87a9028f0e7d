"""[N] Trajectories, rollouts' outcomes and groups: what flows from samplers to the trainer.

Arrays are aligned to tokens: entry t of every array speaks of token t. Nothing here knows of
models, pages or queues.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

NOT_SAMPLED = -1
"""The version of a token that no policy sampled (prompt, tool answer)."""


class RolloutKey(NamedTuple):
    """Names one execution of a task: everything random about it follows from this and the seed."""

    task: str
    prompt: int
    sample: int
    attempt: int = 0


class Origin(StrEnum):
    """How the cache that a segment's tokens were read from came to be."""

    PREFILL = "prefill"
    DECODE = "decode"
    RECOMPUTE = "recompute"


class Segment(NamedTuple):
    """Tokens [start, end) entered the cache under `version`, by `origin`."""

    start: int
    end: int
    version: int
    origin: Origin


class Status(StrEnum):
    COMPLETED = "completed"
    """The agent answered."""
    TRUNCATED = "truncated"
    """The agent ran into its token or turn limit; its reward counts."""
    FAILED = "failed"
    """The environment broke; says nothing of the policy and is kept out of every baseline."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One trainable token stream of T tokens."""

    key: RolloutKey
    tokens: np.ndarray
    """int32[T]."""
    loss_mask: np.ndarray
    """bool[T], true on sampled tokens."""
    behavior_logprobs: np.ndarray
    """float32[T], natural log of the probability the token was really sampled with; 0 elsewhere."""
    versions: np.ndarray
    """int32[T], policy version that sampled the token, NOT_SAMPLED elsewhere."""
    segments: tuple[Segment, ...]
    temperature: float
    """Recorded by the sampler; the trainer scores under it. 1.0 for demonstrations."""
    reward: float | None
    """None for a failed rollout."""
    status: Status
    reason: str = ""
    """Why it failed or was truncated."""
    turns: int = 0
    copy_of: int | None = None
    """The `key.sample` this padding copy repeats; it shares one weight with the original."""
    choices: np.ndarray | None = None
    """uint8 or uint16[n, layers, k]: the experts that the sampler's router chose for the first n
    tokens, under the weights that sampled the token after each. The last sampled one never got
    any. None where they were not recorded."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("loss_mask", "behavior_logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} tokens")
        if np.any((self.versions != NOT_SAMPLED) != self.loss_mask):
            raise ValueError("versions must be set exactly where loss_mask is true")
        if self.choices is not None and (self.choices.ndim != 3 or len(self.choices) > n):
            raise ValueError(f"choices are {list(self.choices.shape)}: [at most {n}, M, k] needed")

    @property
    def valid(self) -> bool:
        return self.status is not Status.FAILED and self.reward is not None

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token; NOT_SAMPLED where nothing was sampled."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else NOT_SAMPLED


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of one prompt, complete: the queue's unit."""

    task: str
    prompt: int
    members: tuple[Trajectory, ...]
    """The valid rollouts in order of `key.sample`, then padding copies."""
    failures: tuple[tuple[int, str], ...] = ()
    """(sample, reason) of rollouts that the environment broke."""

    @property
    def oldest_version(self) -> int:
        versions = [m.oldest_version for m in self.members if m.oldest_version != NOT_SAMPLED]
        return min(versions, default=NOT_SAMPLED)

    @property
    def sampled_tokens(self) -> int:
        return sum(int(m.loss_mask.sum()) for m in self.members if m.copy_of is None)


def copy_of(member: Trajectory) -> Trajectory:
    """A padding copy of `member`."""
    return replace(member, copy_of=member.key.sample)
