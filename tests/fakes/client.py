"""A sampler that says what a script tells it, without a model or pages."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rl_jax.gateway.protocol import Completion, Finish, Request
from rl_jax.trajectories.types import Origin, RolloutKey, Segment

Turn = tuple[int, ...] | Exception
"""The tokens of one turn, or what is raised instead."""


@dataclass
class FakeSampler:
    """A `SamplerClient`. `script(key)` gives a sequence its turns, one a request; token i of the
    run's k-th request has log-probability -(i + 1) / 8 and `version()`."""

    script: Callable[[RolloutKey], Iterator[Turn]]
    version: Callable[[], int] = lambda: 0
    requests: list[tuple[RolloutKey, Request]] = field(default_factory=list)
    opened: list[RolloutKey] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    turns: dict[int, Iterator[Turn]] = field(default_factory=dict)

    async def open(self, key: RolloutKey) -> int:
        self.opened.append(key)
        number = len(self.opened) - 1
        self.turns[number] = self.script(key)
        return number

    async def generate(self, sequence: int, request: Request) -> Completion:
        await asyncio.sleep(0)
        self.requests.append((self.opened[sequence], request))
        turn = next(self.turns[sequence])
        if isinstance(turn, Exception):
            raise turn
        stopped = bool(turn) and turn[-1] in request.stop_ids
        logprobs = tuple(-(i + 1) / 8 for i in range(len(turn)))
        versions = (self.version(),) * len(turn)
        finish = Finish.STOP if stopped else Finish.LENGTH
        return Completion(turn, logprobs, logprobs, versions, finish)

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        return (Segment(0, sequence + 1, self.version(), Origin.PREFILL),)

    async def close(self, sequence: int) -> None:
        self.closed.append(sequence)
