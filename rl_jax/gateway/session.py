"""[H] A rollout's token log: ids are appended, never re-tokenised.

What the trainer gets is this log itself, so it is exactly what was sampled.
"""

from types import TracebackType
from typing import Self

import numpy as np

from rl_jax.gateway.protocol import Completion, Request, SamplerClient
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status, Trajectory


class Session:
    """One trajectory in the making, over one sequence of the sampler. Use as `async with`."""

    def __init__(
        self,
        sampler: SamplerClient,
        key: RolloutKey,
        *,
        temperature: float,
        stop_ids: frozenset[int],
        training: bool,
    ) -> None:
        self._sampler, self._key = sampler, key
        self._temperature, self._stop_ids, self._training = temperature, stop_ids, training
        self._sequence = -1
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._choices: list[np.ndarray] = []
        self._sent = 0

    async def __aenter__(self) -> Self:
        self._sequence = await self._sampler.open(self._key)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._sampler.close(self._sequence)

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token so far; NOT_SAMPLED before the first."""
        sampled = (v for v in self._versions if v != NOT_SAMPLED)
        return min(sampled, default=NOT_SAMPLED)

    def append(self, ids: list[int]) -> None:
        """Adds tokens that nobody sampled: a prompt, a tool's answer."""
        self._tokens += ids
        self._logprobs += [0.0] * len(ids)
        self._versions += [NOT_SAMPLED] * len(ids)

    async def generate(self, max_new_tokens: int) -> Completion:
        """Samples one assistant turn after everything appended so far.

        Where the context has no room for that, nothing is sampled and the log ends before it.
        """
        request = Request(
            new_tokens=tuple(self._tokens[self._sent :]),
            max_new_tokens=max_new_tokens,
            stop_ids=self._stop_ids,
            temperature=self._temperature,
            training=self._training,
        )
        completion = await self._sampler.generate(self._sequence, request)
        if not completion.tokens:
            for log in (self._tokens, self._logprobs, self._versions):
                del log[self._sent :]
        self._tokens += completion.tokens
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        if self._training and completion.choices is not None:
            self._choices.append(completion.choices)
        self._sent = len(self._tokens)
        return completion

    def trajectory(
        self, status: Status, reward: float | None, *, reason: str = "", turns: int = 0
    ) -> Trajectory:
        """The log as a trajectory. Call before the session closes."""
        versions = np.asarray(self._versions, np.int32)
        return Trajectory(
            key=self._key,
            tokens=np.asarray(self._tokens, np.int32),
            loss_mask=versions != NOT_SAMPLED,
            behavior_logprobs=np.asarray(self._logprobs, np.float32),
            versions=versions,
            segments=self._sampler.segments(self._sequence),
            temperature=self._temperature,
            reward=reward,
            status=status,
            reason=reason,
            turns=turns,
            choices=np.concatenate(self._choices) if self._choices else None,
        )
