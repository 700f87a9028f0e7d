"""[N] Sequences and which of them the next step advances. No device, no clock, no thread.

A sequence's log is what has been appended and sampled; the first `cached` tokens of it are in the
pool. One uncached token is a decode, more are a prefill.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rl_jax.arrays import CHUNK
from rl_jax.gateway.protocol import Completion, Finish, Request
from rl_jax.sampler.page_table import PageRow
from rl_jax.trajectories.types import Origin, RolloutKey, Segment


@dataclass
class Running:
    """A request under way and what it has sampled so far."""

    request: Request
    stream: tuple[int, int]
    started: bool = False
    """A step has computed something of it; a drain waits for it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    choices: list[np.ndarray] = field(default_factory=list)
    """[n, M, k] of the tokens that steps of this request were the first to compute."""

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.raw_logprobs),
            tuple(self.versions),
            finish,
            np.concatenate(self.choices) if self.choices else None,
        )


@dataclass
class Sequence:
    """One trajectory's cache and log."""

    number: int
    key: RolloutKey
    row: PageRow
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    recompute_until: int = 0
    """Tokens before this index were cached once under older weights."""
    routed: int = 0
    """Tokens of the log whose experts are recorded."""
    oldest_cached: float = math.inf
    """The oldest version in the cache; inf where nothing is cached."""
    segments: list[Segment] = field(default_factory=list)
    requests: int = 0
    running: Running | None = None
    ended: bool = False
    """A request of it failed or was given up, so its log is not what its client knows: no more."""

    @property
    def uncached(self) -> int:
        return len(self.tokens) - self.cached

    def invalidate(self) -> None:
        """Forgets the cache (new weights): everything is computed again before the next token."""
        self.recompute_until = max(self.recompute_until, self.cached)
        self.cached = 0
        self.oldest_cached = math.inf

    def enter_cache(self, count: int, version: int, origin: Origin) -> None:
        """The next `count` tokens of the log are in the cache now, computed by `version`."""
        start, end = self.cached, self.cached + count
        self.oldest_cached = min(self.oldest_cached, version)
        cut = min(max(start, self.recompute_until), end)
        for a, b, how in ((start, cut, Origin.RECOMPUTE), (cut, end, origin)):
            if a < b:
                self._append(Segment(a, b, version, how))
        self.cached = end

    def record(self, start: int, choices: np.ndarray) -> None:
        """Where tokens of the log from `start` on went, of which the first `routed` stay as they
        are: a token's next one was sampled when it was computed first, never again later."""
        new = choices[max(self.routed - start, 0) :]
        if self.running and len(new):
            # No view, or one sequence keeps the arrays of a whole step.
            self.running.choices.append(new.copy())
            self.routed += len(new)

    def _append(self, new: Segment) -> None:
        last = self.segments[-1] if self.segments else None
        if last and last.end == new.start and last[2:] == new[2:]:
            self.segments[-1] = last._replace(end=new.end)
        else:
            self.segments.append(new)


class Plan(NamedTuple):
    """One step: `rows[i]` is advanced by `counts[i]` tokens in row i; None is an idle row."""

    width: int
    rows: list[Sequence | None]
    counts: list[int]


class Shapes(NamedTuple):
    """The compiled shapes: decode is [slots, 1], prefill [prefill_rows, n] for each n."""

    slots: int
    prefill_rows: int
    prefill_tokens: tuple[int, ...]
    shards: int = 1


def plan(sequences: Iterable[Sequence], shapes: Shapes, *, draining: bool = False) -> Plan | None:
    """The next step for the sequences with a request, oldest first; None when there is nothing.

    Prefill goes first while it can fill half its rows or the decode batch has room for what it
    brings; otherwise decode. While draining only started requests advance.
    """
    ready = [s for s in sequences if s.running and (s.running.started or not draining)]
    prefill = [s for s in ready if s.uncached > 1]
    decode = [s for s in ready if s.uncached == 1]
    if not prefill and not decode:
        return None
    fills = 2 * len(prefill) >= shapes.prefill_rows
    if prefill and (fills or 2 * len(decode) < shapes.slots):
        return _prefill(prefill, shapes)
    return _rows(decode, shapes.slots, 1, shapes.shards)


def _prefill(waiting: list[Sequence], shapes: Shapes) -> Plan:
    """The oldest sequence and all that take the same compiled length.

    A sequence's length depends on nothing but itself, so load never changes what is computed.
    """
    width = _width(waiting[0], shapes)
    alike = [s for s in waiting if _width(s, shapes) == width]
    return _rows(alike, shapes.prefill_rows, width, shapes.shards)


def _width(sequence: Sequence, shapes: Shapes) -> int:
    """The smallest compiled length that takes all it may take next."""
    need = step_size(sequence, shapes.prefill_tokens[-1])
    return next(n for n in shapes.prefill_tokens if n >= need)


def step_size(sequence: Sequence, width: int) -> int:
    """Tokens to take next: never across a multiple of 64, so that cuts are where training cuts."""
    return min(sequence.uncached, width, CHUNK - sequence.cached % CHUNK)


def _rows(chosen: list[Sequence], rows: int, width: int, shards: int) -> Plan:
    per_shard = rows // shards
    table: list[Sequence | None] = []
    for shard in range(shards):
        own = [s for s in chosen if s.row.shard == shard][:per_shard]
        table += own + [None] * (per_shard - len(own))
    return Plan(width, table, [step_size(s, width) if s else 0 for s in table])
