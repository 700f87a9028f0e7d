"""[N] A sampler in simulated time: prefills one by one, decode of all requests side by side.

A request decodes in a slot; requests without one are taken oldest rollout first, as
`sampler.scheduler` takes them. Prefill goes before decode. Time is told by the caller.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from launch.plan.inputs import SamplerRates, step_seconds


@dataclass(eq=False)
class Sampling:
    """What a sampler knows of a rollout."""

    order: int
    """Of the rollout's start."""
    context: float = 0.0
    cached_under: int = -1
    """Version of its cache; -1: none."""
    ended: bool = False
    """Nobody wants its tokens any more."""
    spans: list[tuple[int, float]] = field(default_factory=list)
    """(version, tokens sampled under it), in order."""


@dataclass(eq=False)
class _Request:
    rollout: Sampling
    tokens: float
    """Still to be sampled."""
    new: float
    """Tokens to append first."""


class Replica:
    """One sampler. `advance` to a time before anything else is asked of it at that time."""

    def __init__(self, rates: SamplerRates, slots: int, on_push: str) -> None:
        self._rates, self._slots, self._on_push = rates, slots, on_push
        self.version = 0
        self.rollouts: set[Sampling] = set()
        self.busy_s = 0.0
        self.recomputed = 0.0
        """Tokens whose cache was made again."""
        self.up = True
        self._now = 0.0
        self._steps = 0.0
        """Decode steps done: a request that needs n more ends at this plus n."""
        self._decoding: list[tuple[float, int, _Request]] = []
        self._waiting: list[tuple[int, _Request]] = []
        self._prefills: deque[_Request] = deque()
        self._held: list[_Request] = []
        self._prefill_ends = math.inf
        self._paused_until = 0.0
        self._staged: int | None = None

    @property
    def next_event(self) -> float:
        """When something ends here by itself; inf where nothing runs."""
        if not self.up:
            return math.inf
        if self._prefills:
            return self._prefill_ends
        if self._decoding:
            left = max(self._decoding[0][0] - self._steps, 0.0)
            return max(self._now, self._paused_until) + left * self._step
        return math.inf

    def submit(self, rollout: Sampling, new: float, tokens: float) -> None:
        """Appends `new` tokens to the rollout's context and samples `tokens`, at least one."""
        request = _Request(rollout, tokens, new)
        if self._staged is not None or not self.up:
            self._held.append(request)
        else:
            self._prefill(request)

    def swap(self, version: int) -> None:
        """Takes the weights of `version`: now, or, draining, when no request runs."""
        self._staged = version
        if self._on_push != "drain" or not self._running:
            self._swap()

    def advance(self, now: float) -> list[Sampling]:
        """To the time `now`, at most `next_event`; rollouts whose request ended there."""
        due = now >= self.next_event - 1e-12
        if self._prefills:
            self.busy_s += now - self._now
        elif self._decoding and self.up:
            begin = min(max(self._now, self._paused_until), now)
            self._steps += (now - begin) / self._step
            self.busy_s += now - begin
        self._now = now
        if not due:
            return []
        if not self._prefills:
            # What is left of its last step may be less than a float64 of the time can tell.
            self._steps = max(self._steps, self._decoding[0][0])
        ended = self._prefill_done() if self._prefills else self._decode_done()
        if self._staged is not None and not self._running:
            self._swap()
        return ended

    def cancel(self, rollout: Sampling) -> None:
        """Nothing more of it is sampled."""
        rollout.ended = True
        self.rollouts.discard(rollout)
        self._decoding = [entry for entry in self._decoding if entry[2].rollout is not rollout]
        heapq.heapify(self._decoding)
        self._fill()

    def lose(self) -> list[Sampling]:
        """The sampler goes away; the rollouts that it held."""
        lost = list(self.rollouts)
        for rollout in lost:
            rollout.ended = True
        self.rollouts.clear()
        for queue in (self._decoding, self._waiting, self._prefills, self._held):
            queue.clear()
        self.up = False
        if self._staged is not None:
            self._swap()
        return lost

    def restart(self) -> None:
        """It is back, with the newest weights."""
        self.up = True
        self._release()

    @property
    def _running(self) -> bool:
        return bool(self._decoding or self._prefills or self._waiting)

    @property
    def _step(self) -> float:
        return step_seconds(self._rates, len(self._decoding))

    def _prefill(self, request: _Request) -> None:
        self._prefills.append(request)
        if len(self._prefills) == 1:
            self._begin_prefill()

    def _begin_prefill(self) -> None:
        request = self._prefills[0]
        rollout = request.rollout
        stale = rollout.cached_under != self.version and self._on_push != "keep"
        again = rollout.context if stale else 0.0
        count = request.new + again
        rollout.cached_under = self.version
        rollout.context += request.new
        request.new = 0.0
        self.recomputed += again
        seconds = self._rates.request_s + count / self._rates.prefill_tokens_per_s
        self._prefill_ends = max(self._now, self._paused_until) + seconds

    def _prefill_done(self) -> list[Sampling]:
        request = self._prefills.popleft()
        if self._prefills:
            self._begin_prefill()
        if request.rollout.ended:
            return []
        # Its last step samples the first token.
        self._count(request, 1.0)
        if request.tokens <= 0:
            return [request.rollout]
        heapq.heappush(self._waiting, (request.rollout.order, request))
        self._fill()
        return []

    def _decode_done(self) -> list[Sampling]:
        ended: list[Sampling] = []
        while self._decoding and self._decoding[0][0] <= self._steps + 1e-9:
            request = heapq.heappop(self._decoding)[2]
            self._count(request, request.tokens)
            ended.append(request.rollout)
        self._fill()
        return ended

    def _fill(self) -> None:
        while self._waiting and len(self._decoding) < self._slots:
            order, request = heapq.heappop(self._waiting)
            if not request.rollout.ended:
                heapq.heappush(self._decoding, (self._steps + request.tokens, order, request))

    def _count(self, request: _Request, tokens: float) -> None:
        tokens = min(tokens, request.tokens)
        request.tokens -= tokens
        request.rollout.context += tokens
        if tokens > 0:
            request.rollout.spans.append((self.version, tokens))

    def _swap(self) -> None:
        assert self._staged is not None
        decoding, self._decoding = self._decoding, []
        for end, _, request in decoding:
            self._count(request, request.tokens - max(end - self._steps, 0.0))
        if self._on_push == "keep":
            self._decoding = [
                (self._steps + request.tokens, order, request) for _, order, request in decoding
            ]
            heapq.heapify(self._decoding)
        self.version, self._staged = self._staged, None
        self._paused_until = self._now + self._rates.swap_s
        if self._on_push != "keep":
            waiting, self._waiting = self._waiting, []
            for _, _, request in decoding:
                self._prefill(request)
            for _, request in waiting:
                self._prefill(request)
        if self.up:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self._prefill(request)
