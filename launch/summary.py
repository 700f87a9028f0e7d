"""[H] What a run came to: the numbers of `summary.json`, read off its record."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.report.data import originals, spans
from rl_jax.metrics import names
from rl_jax.metrics.trace import Span
from rl_jax.metrics.writers import read
from rl_jax.replay import events
from rl_jax.replay.fates import Kind
from rl_jax.replay.log import merged

Interval = tuple[float, float]
"""(start, end) in seconds on one clock."""


@dataclass(frozen=True)
class Summary:
    """Solve rates are shares of held-out questions, answered greedily."""

    seed: int
    solve_rate_before: float
    """Before the first update, after the warm start."""
    solve_rate_after: float
    solve_rate_by_hops_before: Mapping[str, float]
    solve_rate_by_hops_after: Mapping[str, float]
    steps: int
    """Optimizer updates of the RL part."""
    versions_published: int
    """Pushes; the initial weights, version 0, are not counted."""
    max_lag: int
    """Largest lag of any token trained on, in pushes."""
    trained_tokens: int
    dropped: int
    """Trajectories sampled and not trained on, whatever the reason."""
    trainer_busy_seconds: float
    sampler_busy_seconds: float
    overlap_seconds: float
    """Both busy at once."""
    max_dlogp_fresh: float | None
    """Largest |behavior - trainer log-probability| under the very version that sampled; None where
    no batch held such a token."""
    wall_seconds: float

    def to_json(self) -> str:
        """Raises ValueError where a number is not finite."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def summarise(run_dir: Path, seed: int) -> Summary:
    """The summary of a run that is finished, from what it left in `run_dir`."""
    told = [entry.event for entry in merged(run_dir)]
    rates = {e.when: dict(e.rates) for e in told if isinstance(e, events.Evaluated)}
    updates = list(read(run_dir / "metrics.jsonl"))
    fates = Counter(
        recorded.fate.kind for recorded in originals(run_dir, told) if recorded.trajectory.valid
    )
    traced = spans(run_dir)
    trainer, sampler = device_spans(traced, "trainer"), device_spans(traced, "sampler")
    begin = min((start for start, _ in trainer), default=0.0)
    end = max((stop for _, stop in trainer), default=0.0)
    training = [(max(a, begin), min(b, end)) for a, b in sampler]
    fresh = [u[names.DLOGP_FRESH] for u in updates if names.DLOGP_FRESH in u]
    return Summary(
        seed=seed,
        solve_rate_before=rates["before"].pop("all"),
        solve_rate_after=rates["after"].pop("all"),
        solve_rate_by_hops_before=rates["before"],
        solve_rate_by_hops_after=rates["after"],
        steps=len(updates),
        versions_published=sum(isinstance(e, events.VersionPublished) for e in told) - 1,
        max_lag=int(max((u[names.LAG_MAX] for u in updates), default=0)),
        trained_tokens=int(updates[-1][names.TRAINED_TOKENS]) if updates else 0,
        dropped=fates[Kind.DROPPED] + fates[Kind.DISCARDED],
        trainer_busy_seconds=busy_seconds(trainer),
        sampler_busy_seconds=busy_seconds(training),
        overlap_seconds=overlap_seconds(trainer, training),
        max_dlogp_fresh=max(fresh, default=None),
        wall_seconds=max((span.end for span in traced), default=0.0),
    )


def device_spans(spans: Iterable[Span], program: str) -> list[Interval]:
    """When a program's mesh was busy, in seconds since the run began; of several samplers, when
    any of them was."""
    return busy(
        (span.start, span.end)
        for span in spans
        if span.process.partition("-")[0] == program and span.track.startswith("device ")
    )


def busy(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as ascending intervals that neither overlap nor touch; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_seconds(intervals: Iterable[Interval]) -> float:
    """Time covered by at least one interval."""
    return sum((end - start for start, end in busy(intervals)), 0.0)


def overlap_seconds(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Time covered by both sides, by one sweep over both."""
    left, right = busy(a), busy(b)
    i = j = 0
    total = 0.0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def report(summary: Summary) -> Sequence[str]:
    """A few lines for people."""
    share = 100 * summary.overlap_seconds / max(summary.trainer_busy_seconds, 1e-9)
    dlogp = summary.max_dlogp_fresh
    before, after = summary.solve_rate_by_hops_before, summary.solve_rate_by_hops_after
    hops = [f"{name}: {before[name]:.2f} -> {after[name]:.2f}" for name in after if name in before]
    return [
        f"held-out solve rate {summary.solve_rate_before:.2f} -> {summary.solve_rate_after:.2f}",
        f"  by hops  {'  '.join(hops)}",
        f"{summary.steps} updates, {summary.versions_published} versions, lag at most "
        f"{summary.max_lag}, {summary.trained_tokens:,} tokens trained, {summary.dropped} "
        f"trajectories dropped",
        f"trainer busy {summary.trainer_busy_seconds:.0f} s, {share:.0f}% of it while the sampler "
        f"worked too; sampler busy {summary.sampler_busy_seconds:.0f} s of "
        f"{summary.wall_seconds:.0f} s",
        "fresh tokens: trainer and sampler log-probabilities differ by "
        + ("(not measured)" if dlogp is None else f"at most {dlogp:.1e}"),
    ]
