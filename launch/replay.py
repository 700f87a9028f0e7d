"""[H] `rl-jax replay RUN`: every update again, from version 0 and the record alone.

No sampler, no queue: the batches are those on record. Each update's loss and each published
version's digest are compared; under an equal numerics fingerprint both must be equal bit for bit.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch import build
from launch.env import fingerprint, fingerprint_digest
from launch.failure import first_cause
from launch.programs.base import Parts, build_parts
from launch.programs.updates import compile_trainer, weights_again
from launch.terminal import Reporter
from rl_jax.arrays import Tree
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.metrics import names
from rl_jax.metrics.writers import read as read_metrics
from rl_jax.replay import events
from rl_jax.replay.log import check_format, read
from rl_jax.replay.trajectory_log import read_groups
from rl_jax.snapshots.manifest import build_manifest, named_leaves
from rl_jax.snapshots.publisher import served_copy
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import Hooks, Pushed, Schedule, Taken, train
from rl_jax.trainer.state import TrainState
from rl_jax.trajectories.types import Group


class Recording(NamedTuple):
    """What the trainer's journal says of its updates."""

    batches: Mapping[int, events.BatchTaken]
    updates: Mapping[int, events.UpdateDone]
    versions: Mapping[int, events.VersionPublished]
    fingerprints: tuple[str, ...]

    @property
    def last(self) -> int:
        return max(self.batches, default=0)


class Comparison(NamedTuple):
    """What a replay came to."""

    updates: int
    versions: int
    """Compared, version 0 included."""
    first_difference: str
    """Empty where there is none."""
    same_numerics: bool
    seconds: float
    """Of the updates alone: starting and compiling left out."""
    recorded_seconds: float
    """The same of the run."""


def read_recording(run_dir: Path) -> Recording:
    """UserError where the run has no update on record."""
    try:
        check_format(run_dir)
        told = [entry.event for entry in read(run_dir, "trainer")]
    except ValueError as error:
        raise UserError(str(error)) from error
    recording = Recording(
        {e.step: e for e in told if isinstance(e, events.BatchTaken)},
        {e.step: e for e in told if isinstance(e, events.UpdateDone)},
        {e.version: e for e in told if isinstance(e, events.VersionPublished)},
        tuple(dict.fromkeys(e.fingerprint for e in told if isinstance(e, events.RunStarted))),
    )
    if not recording.updates or 0 not in recording.versions:
        raise UserError(f"{run_dir} has no update on record: nothing to replay")
    return recording


def replay(
    config: RunConfig, run_dir: Path, reporter: Reporter, recording: Recording
) -> Comparison:
    """Rebuilds every update on record; stops at the first difference under equal numerics."""
    parts = build_parts(config, run_dir, reporter, began=time.time())
    try:
        return asyncio.run(_replay(parts, recording))
    except BaseExceptionGroup as group:
        stopped = first_cause(group)
    raise stopped


async def _replay(parts: Parts, recording: Recording) -> Comparison:
    config = parts.config
    mesh = build.build_trainer_mesh(config)
    parts.reporter.phase("compiling")
    compiled = await asyncio.to_thread(compile_trainer, parts, mesh)
    store = SnapshotStore(parts.run_dir / "snapshots")
    weights = await asyncio.to_thread(weights_again, parts, mesh)
    first = recording.versions[0]
    if store.manifest(0).digest != first.digest:
        raise UserError(f"{parts.run_dir}/snapshots/0 is not the version 0 of this run's journal")
    dispatcher = Dispatcher("replay")
    same = recording.fingerprints == (fingerprint_digest(fingerprint()),)
    player = _Player(parts, recording, store, dispatcher, same)
    try:
        state: TrainState = await dispatcher.run(compiled.step.init, *weights)
        parts.reporter.phase("replay", recording.last)
        player.tell_equal(first)
        began = time.perf_counter()
        own = config.trainer
        await train(
            state,
            compiled.programs,
            Schedule(own.updates, own.push_every, config.deadlines.step_s),
            player.hooks,
            dispatcher,
            advantage=build.build_advantage(config),
            reduction=build.build_loss(config).reduction,
            shape=build.rl_shape(config),
            auditor=None,
            shuffle_seed=config.seed if config.control.rewards == "shuffled" else None,
            save_bad_batch=parts.run_dir / "not_finite_replay.npz",
        )
        seconds = time.perf_counter() - began
    finally:
        dispatcher.close()
    recorded = _training_seconds(parts.run_dir)
    return Comparison(player.updates, player.versions, player.difference, same, seconds, recorded)


class _Player:
    """The hooks of a trainer that trains on what is on record."""

    def __init__(
        self,
        parts: Parts,
        recording: Recording,
        store: SnapshotStore,
        dispatcher: Dispatcher,
        same: bool,
    ) -> None:
        self.updates, self.versions, self.difference = 0, 1, ""
        self._parts, self._recording, self._store = parts, recording, store
        self._dispatcher, self._same = dispatcher, same
        self._groups = _Groups(group for group, _ in read_groups(parts.run_dir))
        self._version = 0

    @property
    def hooks(self) -> Hooks:
        return Hooks(self._take, self._on_update, self._push, lambda u, g: None, self._checkpoint)

    async def _take(self, update: int) -> Taken | None:
        batch = self._recording.batches.get(update)
        if batch is None or update not in self._recording.updates or self.difference:
            return None
        groups = await asyncio.to_thread(lambda: [self._groups.take(g) for g in batch.groups])
        return Taken(groups, batch.published_version)

    async def _on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.updates = update
        told = self._recording.updates[update]
        again = metrics[names.LOSS], metrics[names.GRAD_NORM]
        if self._same and again != (told.loss, told.grad_norm):
            self._differs(
                f"update {update}: loss {told.loss!r}, gradient norm {told.grad_norm!r} on record; "
                f"{again[0]!r}, {again[1]!r} now"
            )
        self._parts.reporter.progress(update, versions=float(self.versions))

    async def _push(self, params: Tree, update: int) -> Pushed:
        served = partial(served_copy, dtype=self._parts.config.sampler.param_dtype)
        copy = await self._dispatcher.run(served, params)
        self._version += 1
        told = self._recording.versions.get(self._version)
        if told is not None:
            self.versions += 1
            if await asyncio.to_thread(self._equal, copy, told):
                self.tell_equal(told)
        return Pushed(self._version, copy)

    async def _checkpoint(self, state: TrainState, update: int) -> None:
        """Nothing is written."""

    def tell_equal(self, told: events.VersionPublished) -> None:
        """A version has the digest that is on record."""
        text = f"version {told.version} (update {told.step})  {told.digest[:16]}  equal"
        self._parts.reporter.note(text)

    def _equal(self, params: Tree, told: events.VersionPublished) -> bool:
        """Whether the digests are; what differs first is kept, or told where it may differ."""
        now = build_manifest(params, told.version, told.step, "")
        if now.digest == told.digest:
            return True
        where = f"version {told.version} (update {told.step})"
        recorded = self._store.manifest(told.version)
        changed = [n for n in sorted(now.leaves) if now.leaves[n] != recorded.leaves[n]]
        if not changed:
            self._differs(f"{where}: the digest on record is not that of its snapshot")
            return False
        weights = named_leaves(self._store.load(told.version, params))
        error = {
            n: _relative(np.asarray(leaf), np.asarray(weights[n]))
            for n, leaf in named_leaves(params).items()
        }
        worst = max(error, key=error.__getitem__)
        text = f"{where}: first in {changed[0]}; relative L2 at most {error[worst]:.1e}, in {worst}"
        if self._same:
            self._differs(text)
        else:
            self._parts.reporter.note(text)
        return False

    def _differs(self, text: str) -> None:
        self.difference = self.difference or text


class _Groups:
    """Groups by name out of a stream that has them about in the order they are wanted."""

    def __init__(self, stream: Iterator[Group]) -> None:
        self._stream = stream
        self._waiting: dict[events.GroupId, Group] = {}

    def take(self, name: events.GroupId) -> Group:
        while name not in self._waiting:
            group = next(self._stream, None)
            if group is None:
                raise UserError(f"the trajectory log lacks the group {name.task}/{name.prompt}")
            self._waiting[events.group_id(group)] = group
        return self._waiting.pop(name)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 distance of a from b."""
    difference, size = np.linalg.norm(np.float64(a - b)), np.linalg.norm(np.float64(b))
    return float(difference / size) if size else float(difference)


def _training_seconds(run_dir: Path) -> float:
    """What the run's trainer took for its updates and pushes, waiting for data left out."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return sum(line[names.STEP_SECONDS] + line[names.PUSH_SECONDS] for line in lines)


def report(run_dir: Path, done: Comparison) -> list[str]:
    """A few lines for people."""
    versions = f"{done.updates} updates and {done.versions} versions"
    share = done.seconds / max(done.recorded_seconds, 1e-9)
    timing = (
        f"replayed in {done.seconds:.0f} s, {share:.2f} of the run's own training time "
        f"({done.recorded_seconds:.0f} s)"
    )
    if done.first_difference:
        return [f"{run_dir}: first difference at {done.first_difference}", timing]
    if not done.same_numerics:
        return [
            f"{run_dir}: {versions} rebuilt; not bit-comparable: the numerics fingerprint is "
            "another one here",
            timing,
        ]
    return [f"{run_dir}: {versions} rebuilt, every digest equal bit for bit", timing]
