"""[H] What a run did, in the terms of a forecast."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from launch.plan.forecast import Forecast
from launch.report.numbers import Lines
from rl_jax.metrics import names
from rl_jax.metrics.trace import Span
from rl_jax.replay.events import BatchTaken, Event, GroupId, VersionApplied
from rl_jax.replay.fates import Kind, Recorded


class Window(NamedTuple):
    """From a run's first rollout to its last update, in seconds since the run began."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def share(self, spans: Sequence[Span]) -> float:
        """Sum of what of `spans` lies inside, over the window."""
        inside = sum(max(0.0, min(s.end, self.end) - max(s.start, self.begin)) for s in spans)
        return inside / self.seconds


def measure(
    updates: Lines,
    spans: Sequence[Span],
    recorded: Sequence[Recorded],
    told: Sequence[Event],
    window: Window,
) -> Forecast:
    """Of a run with these lines of metrics, spans, trajectories of training and events.

    A rollout counts as started under the version that sampled its first token. What recomputed
    caches cost is not on record by itself: the samplers' share of pushes has the pauses alone.
    """
    starts, lags, tokens = _lags(recorded, told)
    busy = steps_of(spans, "sampler")
    pushing = sum(update[names.PUSH_SECONDS] for update in updates)
    dropped = {(r.trajectory.key.prompt, r.fate.kind) for r in recorded}
    groups = len({prompt for prompt, _ in dropped})
    paused = sum(e.pause_s for e in told if isinstance(e, VersionApplied) and e.version)
    return Forecast(
        tokens_per_s=float(tokens.sum()) / window.seconds,
        trainer_idle=waited(updates, window.begin) / window.seconds,
        sampler_idle=1 - sum(map(window.share, busy)) / len(busy),
        lag_mean=float((lags * tokens).sum() / tokens.sum()),
        lag_start=float(starts.mean()),
        lag_start_by_tokens=float((starts * tokens).sum() / tokens.sum()),
        lag_p99=float(np.quantile(starts, 0.99, method="inverted_cdf")),
        in_flight=window.share([span for span in spans if span.track == "rollouts"]),
        trainer_push_share=pushing / window.seconds,
        sampler_push_share=paused / window.seconds / len(busy),
        dropped_share=sum(kind is Kind.DROPPED for _, kind in dropped) / groups,
    )


def waited(updates: Lines, began: float) -> float:
    """Seconds that the trainer waited for batches since `began`, when the first rollout started:
    what came before, as an evaluation, is in the first wait too."""
    first = updates[0]
    busy = first[names.STEP_SECONDS] + first[names.PUSH_SECONDS]
    own = min(first[names.WAIT_SECONDS], max(0.0, first[names.WALL_SECONDS] - busy - began))
    return own + sum(update[names.WAIT_SECONDS] for update in updates[1:])


def steps_of(spans: Sequence[Span], program: str) -> list[list[Span]]:
    """A program's steps, one list for each of its processes."""
    by_track: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.process.partition("-")[0] == program and span.track.startswith("device "):
            by_track[span.process][span.track].append(span)
    # All devices of a mesh run the same.
    return [next(iter(tracks.values())) for tracks in by_track.values()]


def _lags(
    recorded: Sequence[Recorded], told: Sequence[Event]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each trained trajectory: lag of its first token, mean lag of its tokens, how many."""
    published: dict[GroupId, int] = {}
    for event in told:
        if isinstance(event, BatchTaken):
            published |= dict.fromkeys(event.groups, event.published_version)
    rows = []
    for trajectory, fate, _ in recorded:
        if fate.kind is Kind.TRAINED and trajectory.loss_mask.any():
            versions = trajectory.versions[trajectory.loss_mask]
            newest = published[GroupId(trajectory.key.task, trajectory.key.prompt)]
            rows.append((newest - versions[0], newest - versions.mean(), len(versions)))
    starts, lags, tokens = np.array(rows, float).T
    return starts, lags, tokens
