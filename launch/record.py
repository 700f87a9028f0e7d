"""[H] What each program keeps of itself. Where the hooks of programs end.

The trainer has the groups put, batches, versions and metrics; the orchestrator the rollouts that
never reached the queue; each in a journal and a trajectory log of its own.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax.sharding import Mesh

from launch.programs.base import Parts
from launch.report.numbers import known_fates
from launch.resume import COUNTS, Resumption, Rollouts, drop_metrics_after
from launch.summary import Interval, busy_seconds, overlap_seconds
from rl_jax.dispatch import Dispatcher, OnSpan
from rl_jax.metrics import names
from rl_jax.metrics.trace import FOLDER, STEP, WAIT, TraceWriter
from rl_jax.metrics.writers import JsonlWriter, TensorBoardWriter, can_write_tensorboard
from rl_jax.orchestrator.state import Discard
from rl_jax.replay import events
from rl_jax.replay.fates import Fate, Kind
from rl_jax.replay.log import open_log, read
from rl_jax.replay.trajectory_log import open_trajectory_log
from rl_jax.trajectories.types import Group, RolloutKey, Status, Trajectory

_PHASES = (
    ("push and copy", names.PUSH_SECONDS), (STEP, names.STEP_SECONDS), (WAIT, names.WAIT_SECONDS),
)  # fmt: skip
"""Of an update, the last first, and their durations."""
_BUSY_SHARE = {"trainer": names.TRAINER_BUSY_SHARE, "sampler": names.SAMPLER_BUSY_SHARE}


def open_trace(parts: Parts, program: str) -> TraceWriter:
    """The trace of a program, gone on with where it exists."""
    folder = parts.run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    return TraceWriter(folder / f"{program}.json", program)


def spans_of(parts: Parts, trace: TraceWriter, mesh: Mesh) -> OnSpan:
    """For a dispatcher: its executions on the track of every device of `mesh`."""
    tracks = [f"device {device.id}" for device in mesh.devices.flat]

    def on_span(label: str, start: float, end: float) -> None:
        for track in tracks:
            trace.span(track, label, parts.time.of(start), parts.time.of(end))

    return on_span


class TrainerRecord:
    """Journal, groups and metrics of the trainer; `version` is the newest published one."""

    def __init__(self, parts: Parts, resumption: Resumption | None = None) -> None:
        self.version = resumption.newest if resumption else -1
        self.update = resumption.update if resumption else 0
        """The last one done."""
        self.log = open_log(parts.run_dir, "trainer", parts.clock)
        self.trajectories = open_trajectory_log(parts.run_dir, "trainer")
        self._put: set[events.GroupId] = set()
        self._taken: dict[int, tuple[events.GroupId, ...]] = {}
        """Of batches that are on record, by update."""
        self._settle_again(parts.run_dir)
        self.trace = open_trace(parts, "trainer")
        self._parts = parts
        drop_metrics_after(parts.run_dir / "metrics.jsonl", self.update)
        self._writers: list[JsonlWriter | TensorBoardWriter] = [
            JsonlWriter(parts.run_dir / "metrics.jsonl")
        ]
        if can_write_tensorboard():
            self._writers.append(TensorBoardWriter(parts.run_dir / "tensorboard"))
        self._counts = Counter(resumption.counts if resumption else {})
        self._gauges: Mapping[str, Callable[[], float]] = {}
        self._busy: Mapping[str, Dispatcher] = {}
        self._sampled_tokens: Callable[[], int] | None = None
        self._window, self._sampled = time.perf_counter(), 0
        self._offered: list[int] = []

    def _settle_again(self, run_dir: Path) -> None:
        """What the journal says of groups whose trajectories are not sealed yet; a group that is
        not in it was put by a process that was killed right then."""
        told = [entry.event for entry in read(run_dir, "trainer")]
        self._put |= {event.group for event in told if isinstance(event, events.GroupPut)}
        self._taken |= {e.step: e.groups for e in told if isinstance(e, events.BatchTaken)}
        for name, fate in known_fates(told).items():
            self._settle(name, fate)
        for name, group in self.trajectories.open_groups.items():
            if name not in self._put:
                self._put.add(name)
                self.log.append(_put(group))

    def _settle(self, name: events.GroupId, fate: Fate) -> None:
        """Once: an update that is done again gives its groups the fate they have."""
        if name in self.trajectories.open_groups:
            self.trajectories.settle(name, fate)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self.trace.close()
        try:
            await self.trajectories.close()
        finally:
            await self.log.close()

    def watch(
        self,
        gauges: Mapping[str, Callable[[], float]],
        busy: Mapping[str, Dispatcher],
        sampled_tokens: Callable[[], int] | None = None,
    ) -> None:
        """What is read at every update; shares of time and rates count from now."""
        self._gauges, self._busy, self._sampled_tokens = gauges, busy, sampled_tokens
        self._window = time.perf_counter()
        self._sampled = sampled_tokens() if sampled_tokens else 0

    def now(self) -> float:
        """Seconds since the run began."""
        return self._parts.time.now()

    async def on_put(self, group: Group) -> None:
        """Returns when the group is durable: its tokens first, then that it was put."""
        name = events.group_id(group)
        if name in self._put:
            raise ValueError(f"group {name.task}/{name.prompt} is put a second time")
        self._put.add(name)
        await self.trajectories.put(group)
        originals = [m for m in group.members if m.copy_of is None]
        self._offered += [len(m.tokens) for m in originals]
        self._counts[names.FAILED] += len(group.failures)
        tokens = sum(len(m.tokens) for m in originals)
        await self.log.append(events.GroupPut(events.group_id(group), group.oldest_version, tokens))

    def on_drop(self, group: Group, reason: str) -> None:
        """A policy dropped a group at consumption."""
        name = events.group_id(group)
        self._counts[names.DROPPED] += sum(m.copy_of is None for m in group.members)
        written = self.log.append(events.GroupDropped(name, reason))
        fate = Fate(Kind.DROPPED, reason=reason)
        written.add_done_callback(lambda done: done.exception() or self._settle(name, fate))

    async def on_batch(self, update: int, groups: Sequence[Group], published: int) -> None:
        """Returns when membership and order are durable."""
        ids = tuple(events.group_id(group) for group in groups)
        await self.log.append(events.BatchTaken(update, published, ids))
        self._taken[update] = ids

    async def on_digest(self, version: int, digest: str, update: int) -> None:
        await self.log.append(events.VersionPublished(version, digest, update))

    async def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.update = update
        for name in self._taken.pop(update, ()):
            self._settle(name, Fate(Kind.TRAINED, update))
        self.log.append(
            events.UpdateDone(update, float(metrics[names.LOSS]), float(metrics[names.GRAD_NORM]))
        )
        for name in (names.TRAINED_TOKENS, names.TRAINED_TRAJECTORIES):
            self._counts[name] += int(metrics[name])
        self._trace_update(update, metrics)
        gauges = {name: float(read()) for name, read in self._gauges.items()}
        line = {**metrics, **self._totals(), **self._shares(), **gauges}
        wall = self._parts.time.now()
        for writer in self._writers:
            writer.write(update, self.version, wall, line)
        head = {names.STEP: update, names.POLICY_VERSION: self.version, names.WALL_SECONDS: wall}
        self._parts.reporter.update(head | line)
        self.trace.flush()

    def _trace_update(self, update: int, metrics: Mapping[str, float]) -> None:
        """The loop's track: it waited, stepped and pushed one after the other, until now."""
        end = self.now()
        for name, key in _PHASES:
            began = end - metrics[key]
            if began < end:
                self.trace.span("loop", name, began, end, update=update)
            end = began

    def _totals(self) -> dict[str, float]:
        offered, self._offered = self._offered, []
        totals = {name: float(self._counts[name]) for name in COUNTS}
        return totals | ({names.OFFERED_LENGTH: sum(offered) / len(offered)} if offered else {})

    def _shares(self) -> dict[str, float]:
        """Of the time since the last update."""
        begin, self._window = self._window, time.perf_counter()
        span = max(self._window - begin, 1e-9)
        busy = {
            name: within(dispatcher.busy, begin, self._window)
            for name, dispatcher in self._busy.items()
        }
        shares = {_BUSY_SHARE[name]: busy_seconds(spans) / span for name, spans in busy.items()}
        if {"trainer", "sampler"} <= busy.keys():
            own = max(busy_seconds(busy["trainer"]), 1e-9)
            shares[names.OVERLAP_SHARE] = overlap_seconds(busy["trainer"], busy["sampler"]) / own
        if self._sampled_tokens is not None:
            before, self._sampled = self._sampled, self._sampled_tokens()
            shares[names.SAMPLER_TOKENS_PER_SECOND] = (self._sampled - before) / span
        return shares


class OrchestratorRecord:
    """Journal of rollouts, and the trajectories that never reach the queue."""

    def __init__(self, parts: Parts, again: Rollouts | None = None) -> None:
        self.log = open_log(parts.run_dir, "orchestrator", parts.clock)
        self.trajectories = open_trajectory_log(parts.run_dir, "orchestrator")
        self.trace = open_trace(parts, "orchestrator")
        self._parts = parts
        self._began: dict[RolloutKey, float] = {}
        for key in again.lost if again else ():
            self.on_lost(key, "the run stopped")

    async def close(self) -> None:
        self.trace.close()
        try:
            await self.trajectories.close()
        finally:
            await self.log.close()

    def on_started(self, key: RolloutKey) -> None:
        self._began[key] = self._parts.time.now()
        self.log.append(events.RolloutStarted(key))

    def on_lost(self, key: RolloutKey, reason: str) -> None:
        self._began.pop(key, None)
        self.log.append(events.RolloutLost(key, reason))

    async def on_rollout(self, trajectory: Trajectory) -> None:
        """A rollout ended, however; a failed one is kept here, others with their group.

        Returns when that is durable: its group is put after it, into another program's journal.
        """
        key, status = trajectory.key, trajectory.status
        written = self.log.append(events.RolloutDone(key, status.value, len(trajectory.tokens)))
        began = self._began.pop(key, None)
        if began is not None:
            now = self._parts.time.now()
            self.trace.span("rollouts", f"{key.task}/{key.prompt}/{key.sample}", began, now)
        if status is Status.FAILED:
            fate = Fate(Kind.FAILED, reason=trajectory.reason)
            await self.trajectories.add([trajectory], fate)
        await written

    async def on_discard(self, discard: Discard) -> None:
        """A group never came to be."""
        name = events.GroupId(discard.task, discard.prompt)
        if discard.members:
            fate = Fate(Kind.DISCARDED, reason=discard.reason)
            await self.trajectories.add(discard.members, fate)
        await self.log.append(events.GroupDiscarded(name, discard.reason))
        self._parts.reporter.note(
            f"group {discard.task} {discard.prompt} given up: {discard.reason}"
        )

    async def on_left(self, whole: Sequence[Trajectory]) -> None:
        """No more rollouts; these ended, and their groups are not complete."""
        await self.trajectories.add(whole, Fate(Kind.OPEN, reason="the run ended"))

    async def on_evaluated(
        self, when: str, version: int, done: Sequence[Trajectory], rates: Mapping[str, float]
    ) -> None:
        await self.trajectories.add(done, Fate(Kind.EVALUATED, version))
        await self.log.append(events.Evaluated(when, version, rates))


def _put(group: Group) -> events.GroupPut:
    tokens = sum(len(m.tokens) for m in group.members if m.copy_of is None)
    return events.GroupPut(events.group_id(group), group.oldest_version, tokens)


def within(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """What of ascending `intervals` lies in [begin, end]."""
    inside = []
    for a, b in reversed(intervals):
        if b <= begin:
            break
        inside.append((max(a, begin), min(b, end)))
    return [(a, b) for a, b in reversed(inside) if a < b]
