"""[N] A trajectory turn by turn, and which trajectories of a run are worth reading."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from launch.report.numbers import Row
from rl_jax.replay.events import BatchTaken, Event
from rl_jax.replay.fates import Fate, Kind
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to their text."""

LIKELY = (0.95, 0.75, 0.4, 0.1, 0.02)
"""Probabilities that part the grades of a token: grade 0 is above the first."""


class Token(NamedTuple):
    id: int
    text: str
    version: int
    """NOT_SAMPLED where it was given."""
    logprob: float
    """0 where it was given."""

    @property
    def grade(self) -> int:
        """0, as good as certain, to len(LIKELY), a surprise; -1 where it was given."""
        if self.version == NOT_SAMPLED:
            return -1
        return sum(math.exp(self.logprob) <= bound for bound in LIKELY)


class Turn(NamedTuple):
    """A run of tokens that one side spoke: "prompt", then "policy" and "environment"; or tokens
    "left out", with a text that counts them."""

    speaker: str
    start: int
    text: str
    tokens: tuple[Token, ...]


LEFT_OUT = "left out"


def turns(trajectory: Trajectory, decode: Decode, limit: int | None = None) -> list[Turn]:
    """The turns in order; together they hold every token once. Of more than `limit` tokens the
    middle is left out. A turn's text is decoded whole, since ids apart may not give the same, and
    each token's alone besides."""
    spans = list(_spans(trajectory.loss_mask.tolist()))
    total = len(trajectory.tokens)
    if limit is None or total <= limit:
        return [_turn(trajectory, decode, *span) for span in spans]
    head, tail = limit - limit // 3, total - limit // 3
    before = [(who, a, min(b, head)) for who, a, b in spans if a < head]
    after = [(who, max(a, tail), b) for who, a, b in spans if b > tail]
    return [
        *(_turn(trajectory, decode, *span) for span in before),
        Turn(LEFT_OUT, head, f"{tail - head:,} tokens left out", ()),
        *(_turn(trajectory, decode, *span) for span in after),
    ]


def _spans(mask: Sequence[bool]) -> Iterator[tuple[str, int, int]]:
    start = 0
    for sampled, length in runs_of(mask):
        given = "environment" if start else "prompt"
        yield "policy" if sampled else given, start, start + length
        start += length


def _turn(trajectory: Trajectory, decode: Decode, speaker: str, start: int, end: int) -> Turn:
    ids = trajectory.tokens[start:end].tolist()
    columns = zip(
        ids,
        (decode([i]) for i in ids),
        trajectory.versions[start:end].tolist(),
        trajectory.behavior_logprobs[start:end].tolist(),
        strict=True,
    )
    return Turn(speaker, start, decode(ids), tuple(Token(*c) for c in columns))


def runs_of[T](values: Iterable[T]) -> list[tuple[T, int]]:
    """Equal neighbours as (value, how many)."""
    return [(value, len(list(same))) for value, same in groupby(values)]


def name_of(key: RolloutKey) -> str:
    """task/prompt/sample, and /attempt where it is not the first."""
    return f"{key.task}/{key.prompt}/{key.sample}" + (f"/{key.attempt}" if key.attempt else "")


def outcome(trajectory: Trajectory) -> str:
    """How it ended and what it was worth, in a few words."""
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    reason = f" ({trajectory.reason})" if trajectory.reason else ""
    return f"{trajectory.status}{reason}, {reward}"


def fate_text(fate: Fate) -> str:
    """What became of it, in a few words."""
    match fate.kind:
        case Kind.TRAINED:
            return f"trained in update {fate.step}"
        case Kind.EVALUATED:
            return f"evaluated under version {fate.step}"
        case Kind.OPEN:
            return "no fate yet"
        case kind:
            return f"{kind}: {fate.reason}" if fate.reason else str(kind)


class Pick(NamedTuple):
    """A trajectory to read, and why this one."""

    why: str
    row: Row


def picks(rows: Sequence[Row], events: Iterable[Event]) -> list[Pick]:
    """A few rows that show the variety of a run, each once: what was learnt from first and last,
    extremes, and one of every other end. Of several that fit, the last is taken."""
    chosen: dict[tuple[RolloutKey, Fate], Pick] = {}
    for why, found in _wanted(rows, {e.step: e for e in events if isinstance(e, BatchTaken)}):
        if found is not None:
            chosen.setdefault((found.key, found.fate), Pick(why, found))
    return list(chosen.values())


def _wanted(
    rows: Sequence[Row], batches: Mapping[int, BatchTaken]
) -> Iterator[tuple[str, Row | None]]:
    trained = sorted((r for r in rows if r.trained), key=lambda r: r.fate.step)
    best = max((r.reward or 0.0 for r in trained), default=0.0)
    solved = [r for r in trained if (r.reward or 0.0) >= best > 0]
    missed = [r for r in trained if (r.reward or 0.0) < best]

    def lag(r: Row) -> int:
        batch = batches.get(r.fate.step)
        return batch.published_version - min(r.versions, default=0) if batch else 0

    yield "solved, among the last trained on", _last(solved)
    yield "not solved, among the last trained on", _last(missed)
    yield "solved, among the first trained on", next(iter(solved), None)
    yield "not solved, among the first trained on", next(iter(missed), None)
    yield "tokens of most versions", max(trained, key=lambda r: len(r.versions), default=None)
    yield "oldest when trained on", max(trained, key=lag, default=None)
    yield "longest trained on", max(trained, key=lambda r: r.length, default=None)
    yield "ran into a limit", _last([r for r in trained if r.status is Status.TRUNCATED])
    yield "dropped at the queue", _last(_ended(rows, Kind.DROPPED))
    yield "its group never came to be", _last(_ended(rows, Kind.DISCARDED))
    yield "the environment broke", _last(_ended(rows, Kind.FAILED))
    yield "not consumed yet", _last(_ended(rows, Kind.OPEN))
    evaluated = _ended(rows, Kind.EVALUATED)
    yield "held out, solved", _last([r for r in evaluated if (r.reward or 0.0) > 0])
    yield "held out, not solved", _last([r for r in evaluated if not r.reward])


def _ended(rows: Sequence[Row], kind: Kind) -> list[Row]:
    return [r for r in rows if r.fate.kind is kind]


def _last(rows: Sequence[Row]) -> Row | None:
    return rows[-1] if rows else None
