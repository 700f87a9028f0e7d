"""[N] Every number that a report shows, from a run's events, metrics and trajectories."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rl_jax.metrics import names
from rl_jax.replay.events import (
    BatchTaken,
    Evaluated,
    Event,
    GroupDropped,
    GroupId,
    RunEnded,
    RunStarted,
    UpdateDone,
    VersionApplied,
    VersionPublished,
)
from rl_jax.replay.fates import OPEN, Fate, Kind, Recorded
from rl_jax.trajectories.types import RolloutKey, Status

Lines = Sequence[Mapping[str, Any]]
"""The lines of `metrics.jsonl` that speak of updates, in order."""


class Row(NamedTuple):
    """One trajectory without its tokens."""

    key: RolloutKey
    fate: Fate
    label: str
    status: Status
    reward: float | None
    length: int
    """Tokens, sampled or not."""
    versions: Mapping[int, int]
    """Version -> sampled tokens of it."""

    @property
    def sampled(self) -> int:
        return sum(self.versions.values())

    @property
    def offered(self) -> bool:
        """A valid, finished rollout of training: it could have been trained on."""
        valid = self.status is not Status.FAILED and self.reward is not None
        return valid and self.fate.kind not in (Kind.FAILED, Kind.EVALUATED)

    @property
    def trained(self) -> bool:
        return self.fate.kind is Kind.TRAINED


def known_fates(events: Iterable[Event]) -> dict[GroupId, Fate]:
    """What a journal says became of groups; a batch is trained on when its update is done."""
    fates: dict[GroupId, Fate] = {}
    taken: dict[int, tuple[GroupId, ...]] = {}
    for event in events:
        match event:
            case GroupDropped(group, reason):
                fates[group] = Fate(Kind.DROPPED, reason=reason)
            case BatchTaken(step, _, groups):
                taken[step] = groups
            case UpdateDone(step):
                fates |= dict.fromkeys(taken.get(step, ()), Fate(Kind.TRAINED, step))
    return fates


def settled(recorded: Recorded, fates: Mapping[GroupId, Fate]) -> Recorded:
    """With the fate that its log does not tell yet: logs learn of fates later than journals."""
    key, fate = recorded.trajectory.key, recorded.fate
    if fate != OPEN:
        return recorded
    return recorded._replace(fate=fates.get(GroupId(key.task, key.prompt), fate))


def row(recorded: Recorded, label: str) -> Row:
    """What numbers are taken from; `label` is the trajectory's."""
    t = recorded.trajectory
    versions, counts = np.unique(t.versions[t.loss_mask], return_counts=True)
    by_version = dict(zip(versions.tolist(), counts.tolist(), strict=True))
    return Row(t.key, recorded.fate, label, t.status, t.reward, len(t.tokens), by_version)


def state(events: Iterable[Event], *, running: bool) -> str:
    """What the run's end says ("finished" or "stopped"), "running" before that, or "killed" where
    it has no end; `running` says whether a program of it still writes. Who finishes a run writes
    its report while it runs."""
    ended = ""
    for event in events:
        match event:
            case RunStarted():
                ended = ""
            case RunEnded(reason):
                ended = reason
    return "running" if running and ended != "finished" else ended or "killed"


def series(lines: Lines, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(update, value) float64[n] of the lines that have the metric `name`."""
    told = [(line[names.STEP], line[name]) for line in lines if line.get(name) is not None]
    return np.array([s for s, _ in told], float), np.array([v for _, v in told], float)


def smooth(values: np.ndarray, keep: float = 0.8) -> np.ndarray:
    """The running mean m = keep * m + (1 - keep) * value, begun at the first value."""
    out = np.array(values, float)
    for i in range(1, len(out)):
        out[i] = keep * out[i - 1] + (1 - keep) * out[i]
    return out


def blocks(values: np.ndarray, limit: int) -> np.ndarray:
    """Means of equal runs of values, at most `limit` of them; nan where a run is all nan."""
    size = max(-(-len(values) // limit), 1)
    padded = np.full(-(-len(values) // size) * size, np.nan)
    padded[: len(values)] = values
    runs = padded.reshape(-1, size)
    told = np.isfinite(runs)
    total = np.where(told, runs, 0.0).sum(1)
    return np.where(told.any(1), total / np.maximum(told.sum(1), 1), np.nan)


class Clocks(NamedTuple):
    """Three ways to say how far a run was: float64[n], one entry a line of metrics."""

    updates: np.ndarray
    tokens: np.ndarray
    """Trained so far."""
    seconds: np.ndarray
    """Since the run began."""

    def at(self, update: int) -> tuple[float, float, float]:
        """Where `update` lies on each; update 0 is at 0 tokens and at the first line's time."""
        if not len(self.updates):
            return float(update), 0.0, 0.0
        tokens = np.interp(update, np.r_[0, self.updates], np.r_[0, self.tokens])
        seconds = np.interp(update, self.updates, self.seconds)
        return float(update), float(tokens), float(seconds)


def clocks(lines: Lines) -> Clocks:
    """The three clocks; a line without a number of trained tokens counts as those before it."""
    tokens = [0, *(line.get(names.TRAINED_TOKENS) or 0 for line in lines)]
    columns = ([line[name] for line in lines] for name in (names.STEP, names.WALL_SECONDS))
    updates, seconds = (np.array(column, float) for column in columns)
    return Clocks(updates, np.maximum.accumulate(np.array(tokens, float))[1:], seconds)


class HeldOut(NamedTuple):
    """Solve rate on held-out prompts under `version`, published at `update`."""

    version: int
    update: int
    rate: float
    by_label: Mapping[str, float]


def held_out(events: Iterable[Event]) -> list[HeldOut]:
    """The evaluations in the order they were made."""
    updates: dict[int, int] = {}
    found = []
    for event in events:
        match event:
            case VersionPublished(version, _, update):
                updates[version] = update
            case Evaluated(_, version, rates) if "all" in rates:
                labels = {k: v for k, v in rates.items() if k != "all"}
                found.append(HeldOut(version, updates.get(version, 0), rates["all"], labels))
    return found


def lag_tokens(rows: Iterable[Row], events: Iterable[Event]) -> dict[int, int]:
    """Lag in pushes when a batch was taken -> sampled tokens trained on with it, ascending."""
    published = {e.step: e.published_version for e in events if isinstance(e, BatchTaken)}
    lags: Counter[int] = Counter()
    for r in rows:
        if r.trained and r.fate.step in published:
            for version, tokens in r.versions.items():
                lags[published[r.fate.step] - version] += tokens
    return dict(sorted(lags.items()))


class Lengths(NamedTuple):
    """Tokens of each trajectory, int64[n]."""

    trained: np.ndarray
    offered: np.ndarray

    @property
    def means(self) -> tuple[float, float]:
        """(trained, offered); nan where there is none."""
        trained, offered = (float(x.mean()) if len(x) else np.nan for x in self)
        return trained, offered

    @property
    def difference(self) -> float:
        """How far the mean trained length is from the offered one, as a share of the latter."""
        trained, offered = self.means
        return trained / offered - 1


def lengths(rows: Iterable[Row]) -> Lengths:
    """Lengths of what was trained on, and of all that could have been."""
    offered = [r for r in rows if r.offered]
    trained = [r.length for r in offered if r.trained]
    return Lengths(np.array(trained, int), np.array([r.length for r in offered], int))


class LabelShare(NamedTuple):
    """A label's share of the trajectories of each kind."""

    label: str
    trained: float
    offered: float


def label_shares(rows: Iterable[Row]) -> list[LabelShare]:
    """By label, in the order of labels."""
    offered = [r for r in rows if r.offered]
    every, taken = Counter(r.label for r in offered), Counter(r.label for r in offered if r.trained)
    trained = max(taken.total(), 1)
    return [LabelShare(x, taken[x] / trained, every[x] / len(offered)) for x in sorted(every)]


class FateLine(NamedTuple):
    """How many trajectories, with how many sampled tokens, ended like this."""

    kind: Kind
    reason: str
    trajectories: int
    tokens: int


def fates(rows: Iterable[Row]) -> list[FateLine]:
    """By kind in the order of `Kind`, then by tokens; numbers in reasons become N."""
    counts: dict[tuple[Kind, str], list[int]] = defaultdict(lambda: [0, 0])
    for r in rows:
        found = counts[r.fate.kind, re.sub(r"\d+(\.\d+)?", "N", r.fate.reason)]
        found[0] += 1
        found[1] += r.sampled
    lines = [FateLine(kind, reason, *n) for (kind, reason), n in counts.items()]
    order = list(Kind)
    return sorted(lines, key=lambda x: (order.index(x.kind), -x.tokens, x.reason))


class Waits(NamedTuple):
    """The trainer's seconds of each update, float64[n]."""

    updates: np.ndarray
    wait: np.ndarray
    """For the queue."""
    step: np.ndarray
    push: np.ndarray
    rest: np.ndarray
    """What is left of the time since the line before; 0 at the first."""

    @property
    def shares(self) -> dict[str, float]:
        """Of the whole: "wait", "step", "push", "rest"."""
        parts = {name: float(getattr(self, name).sum()) for name in self._fields[1:]}
        return {name: part / max(sum(parts.values()), 1e-9) for name, part in parts.items()}


def waits(lines: Lines) -> Waits:
    """Where the trainer's time went; a part that a line does not tell is 0."""
    updates = np.array([line[names.STEP] for line in lines], float)
    wall = np.array([line[names.WALL_SECONDS] for line in lines], float)
    told = (names.WAIT_SECONDS, names.STEP_SECONDS, names.PUSH_SECONDS)
    wait, step, push = (np.array([line.get(n) or 0.0 for line in lines], float) for n in told)
    rest = np.r_[0.0, np.diff(wall)] - wait - step - push if len(wall) else wall
    return Waits(updates, wait, step, push, np.maximum(rest, 0.0) * (np.arange(len(wall)) > 0))


def trained_per_second(lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """(update, tokens trained per second since the line before), from the second line on."""
    at = clocks(lines)
    rate = np.diff(at.tokens) / np.maximum(np.diff(at.seconds), 1e-9)
    return at.updates[1:], rate


class Version(NamedTuple):
    """One published version; None where nothing says."""

    version: int
    update: int
    digest: str
    published: float | None
    """Seconds since the run began."""
    applied_after: float | None
    """Seconds from there until a sampler had it."""
    pause: float | None
    """Seconds that the sampler stood still for it, the longest of all samplers."""


def versions(
    events: Iterable[Event],
    lines: Lines,
    pushed: Mapping[int, float],
    swapped: Mapping[int, float],
) -> list[Version]:
    """Published versions, ascending. `pushed` and `swapped` say when a trace saw a push and the
    first swap end; where it saw no push, the first line of metrics that knows the version does."""
    seen: dict[int, float] = {}
    for line in lines:
        seen.setdefault(line[names.POLICY_VERSION], line[names.WALL_SECONDS])
    found: dict[int, Version] = {}
    pauses: dict[int, float] = {}
    for event in events:
        match event:
            case VersionPublished(version, digest, update):
                at = pushed.get(version, seen.get(version))
                known = version in pushed and version in swapped
                after = max(swapped[version] - pushed[version], 0.0) if known else None
                found[version] = Version(version, update, digest, at, after, None)
            case VersionApplied(version, pause_s):
                pauses[version] = max(pause_s, pauses.get(version, 0.0))
    return [found[v]._replace(pause=pauses.get(v)) for v in sorted(found)]
