"""[H] What a run keeps of itself: journal, metrics, counts. Where the hooks of programs end."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch.summary import Interval, busy_seconds, overlap_seconds
from launch.terminal import Reporter
from rl_jax.dispatch import Dispatcher
from rl_jax.metrics import names
from rl_jax.metrics.writers import JsonlWriter
from rl_jax.orchestrator.state import Discard
from rl_jax.replay import events
from rl_jax.replay.journal import Journal
from rl_jax.trajectories.types import Group, Status, Trajectory


class Record:
    """The open record of one run. `began` is on the clock of `time.perf_counter`."""

    def __init__(
        self,
        run_dir: Path,
        journal: Journal,
        reporter: Reporter,
        trainer: Dispatcher,
        sampler: Dispatcher,
        began: float,
    ) -> None:
        self.began = began
        self.version = -1
        """Newest published; -1 before the first, which is 0."""
        self.counts: Counter[str] = Counter()
        self.max_lag = 0
        self.max_dlogp_fresh: float | None = None
        self._journal, self._reporter = journal, reporter
        self._metrics = JsonlWriter(run_dir / "metrics.jsonl")
        self._trainer, self._sampler = trainer, sampler
        self._update = 0
        """The last whose batch was taken: what is published now is after it."""
        self._gauges: Mapping[str, Callable[[], float]] = {}
        self._sampled_tokens: Callable[[], int] = lambda: 0
        self._window, self._sampled = time.perf_counter(), 0
        self._offered: list[int] = []

    def close(self) -> None:
        self._metrics.close()

    def watch(
        self, gauges: Mapping[str, Callable[[], float]], sampled_tokens: Callable[[], int]
    ) -> None:
        """Numbers to be read at every update. Shares and rates of the first count from now."""
        self._gauges, self._sampled_tokens = gauges, sampled_tokens
        self._window, self._sampled = time.perf_counter(), sampled_tokens()

    async def event(self, event: events.Event) -> None:
        """Returns when the event is durable."""
        await self._journal.append(events.encode(event))

    async def on_digest(self, version: int, digest: str) -> None:
        await self.event(events.VersionPublished(version, digest, self._update))

    async def on_put(self, group: Group) -> None:
        await self.event(events.GroupPut(group))

    def on_drop(self, group: Group, reason: str) -> None:
        """A policy dropped a group at consumption."""
        self.counts["dropped"] += len(_originals(group))
        self._journal.append(events.encode(events.GroupDropped(events.group_id(group), reason)))

    async def on_discard(self, discard: Discard) -> None:
        """A group never came to be."""
        self.counts["dropped"] += discard.valid
        self._reporter.note(f"group {discard.task} {discard.prompt} given up: {discard.reason}")

    async def on_rollout(self, trajectory: Trajectory) -> None:
        self._offered.append(len(trajectory.tokens))
        if trajectory.status is Status.FAILED:
            self.counts["failed"] += 1
            await self.event(events.RolloutFailed(trajectory.key, trajectory.reason))

    async def on_batch(self, update: int, groups: Sequence[Group]) -> None:
        self._update = update
        ids = tuple(events.group_id(group) for group in groups)
        await self.event(events.BatchTaken(update, self.version, ids))

    async def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.counts["updates"] = update
        self.counts["tokens"] += int(metrics[names.TRAINED_TOKENS])
        self.counts["trajectories"] += int(metrics[names.TRAINED_TRAJECTORIES])
        self.max_lag = max(self.max_lag, int(metrics[names.LAG_MAX]))
        if (fresh := metrics.get(names.DLOGP_FRESH)) is not None:
            self.max_dlogp_fresh = max(fresh, self.max_dlogp_fresh or 0.0)
        await self.event(events.UpdateDone(update, metrics))
        gauges = {name: float(read()) for name, read in self._gauges.items()}
        line = {**metrics, **self._totals(), **self._shares(), **gauges}
        wall = time.perf_counter() - self.began
        self._metrics.write(update, self.version, wall, line)
        self._reporter.update(
            {names.STEP: update, names.POLICY_VERSION: self.version, names.WALL_SECONDS: wall}
            | line
        )

    def _totals(self) -> dict[str, float]:
        offered, self._offered = self._offered, []
        totals = {
            names.TRAINED_TOKENS: self.counts["tokens"],
            names.TRAINED_TRAJECTORIES: self.counts["trajectories"],
            names.DROPPED: self.counts["dropped"],
            names.FAILED: self.counts["failed"],
        }
        return totals | ({names.OFFERED_LENGTH: sum(offered) / len(offered)} if offered else {})

    def _shares(self) -> dict[str, float]:
        before, self._sampled = self._sampled, self._sampled_tokens()
        begin, self._window = self._window, time.perf_counter()
        span = max(self._window - begin, 1e-9)
        trainer = within(self._trainer.busy, begin, self._window)
        sampler = within(self._sampler.busy, begin, self._window)
        busy = busy_seconds(trainer)
        return {
            names.TRAINER_BUSY_SHARE: busy / span,
            names.SAMPLER_BUSY_SHARE: busy_seconds(sampler) / span,
            names.OVERLAP_SHARE: overlap_seconds(trainer, sampler) / max(busy, 1e-9),
            names.SAMPLER_TOKENS_PER_SECOND: (self._sampled - before) / span,
        }


def within(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """What of ascending `intervals` lies in [begin, end]."""
    inside = []
    for a, b in reversed(intervals):
        if b <= begin:
            break
        inside.append((max(a, begin), min(b, end)))
    return [(a, b) for a, b in reversed(inside) if a < b]


def _originals(group: Group) -> list[Trajectory]:
    return [m for m in group.members if m.copy_of is None]
