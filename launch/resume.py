"""[H] What a stopped or killed run goes on from: its last checkpoint, and its journal to the end.

Groups that were put and not trained on are in the trajectory log; batches on record after the
checkpoint are trained again as they were; rollouts under way are issued again.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launch.report.data import is_running
from rl_jax.config.base import UserError
from rl_jax.metrics import names
from rl_jax.metrics.writers import read as read_metrics
from rl_jax.orchestrator.state import Resume
from rl_jax.replay import events
from rl_jax.replay.log import check_format, merged
from rl_jax.replay.trajectory_log import read_groups
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.loop import Taken
from rl_jax.trajectories.types import Group, RolloutKey

COUNTS = (names.TRAINED_TOKENS, names.TRAINED_TRAJECTORIES, names.DROPPED, names.FAILED)


class Rollouts(NamedTuple):
    """Where the orchestrator goes on."""

    resume: Resume
    lost: tuple[RolloutKey, ...]
    """Rollouts that were under way."""
    evaluated: frozenset[str]
    """Which evaluations are on record."""


class Resumption(NamedTuple):
    update: int
    """Of the checkpoint; 0: version 0 is the state."""
    version: int
    """Newest at the checkpoint."""
    newest: int
    """The newest version that was published to the end."""
    digests: Mapping[int, str]
    """Of every version on record, one that was cut short included."""
    logged: Mapping[int, Taken]
    """Batches on record after the checkpoint."""
    queued: tuple[Group, ...]
    """Put, and neither trained on nor dropped."""
    rollouts: Rollouts
    counts: Mapping[str, int]
    """`COUNTS` at the checkpoint."""


class _Told(NamedTuple):
    """A journal, read once."""

    digests: dict[int, str]
    checkpoint: events.CheckpointSaved
    batches: dict[int, events.BatchTaken]
    put: dict[events.GroupId, int]
    """With the oldest version that sampled a token."""
    dropped: set[events.GroupId]
    discarded: set[events.GroupId]
    keys: dict[events.GroupId, set[RolloutKey]]
    """Rollouts issued that have not ended."""
    attempts: dict[events.GroupId, int]
    began: dict[events.GroupId, int]
    """The version that was the newest when a group was started."""
    evaluated: set[str]
    finished: bool

    def trained(self, update: int) -> set[events.GroupId]:
        """The groups of every batch up to `update`."""
        return {name for step, b in self.batches.items() if step <= update for name in b.groups}


def resumption(run_dir: Path) -> Resumption | None:
    """None where not even version 0 was published: such a run begins anew.

    UserError where the record is broken.
    """
    told = _told(run_dir)
    if (newest := _newest(run_dir, told)) is None:
        return None
    update = told.checkpoint.step
    groups = _groups(run_dir, told, update)
    logged = {
        step: Taken([groups[name] for name in batch.groups], batch.published_version)
        for step, batch in told.batches.items()
        if step > update
    }
    taken = told.dropped.union(*(batch.groups for batch in told.batches.values()))
    return Resumption(
        update=update,
        version=told.checkpoint.version,
        newest=newest,
        digests=told.digests,
        logged=logged,
        queued=tuple(group for name, group in groups.items() if name not in taken),
        rollouts=_rollouts(told, update, newest),
        counts=_counts(run_dir, update),
    )


def rollouts_on_record(run_dir: Path, update: int) -> Rollouts | None:
    """Where rollouts go on beside a trainer that has done `update`; None before version 0.

    Reading events only, also while the run goes on.
    """
    told = _told(run_dir)
    newest = _newest(run_dir, told)
    return None if newest is None else _rollouts(told, update, newest)


def _newest(run_dir: Path, told: _Told) -> int | None:
    """The newest version that was published to its end."""
    there = told.digests.keys() & set(SnapshotStore(run_dir / "snapshots").versions())
    return max(there, default=None)


def _rollouts(told: _Told, update: int, newest: int) -> Rollouts:
    """A batch after `update` is still to be trained on, so its groups are not settled."""
    trained = told.trained(update)
    under_way = [g for g in told.keys if g not in told.put and g not in told.discarded]
    queued = [g for g in told.put if g not in trained and g not in told.dropped]
    resume = Resume(
        next_prompt=1 + max((g.prompt for g in told.keys), default=-1),
        reissue=tuple((g.prompt, told.attempts[g] + 1) for g in under_way),
        # A version is on record a little before anything starts under it.
        queued=tuple((g.prompt, min(told.began[g], told.put[g])) for g in queued),
        started=len(trained) + len(queued) + len(under_way),
        published=newest,
    )
    lost = sorted(key for group in under_way for key in told.keys[group])
    return Rollouts(resume, tuple(lost), frozenset(told.evaluated))


def drop_metrics_after(path: Path, update: int) -> None:
    """Removes the lines of updates that will be done again."""
    lines = read_metrics(path) if path.is_file() else []
    kept = [line for line in lines if line[names.STEP] <= update]
    if len(kept) < len(lines):
        whole = path.with_suffix(".part")
        whole.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        whole.replace(path)


def is_finished(run_dir: Path) -> bool:
    """Whether the record says that all was done."""
    return _told(run_dir).finished


def check_resumable(run_dir: Path) -> None:
    """UserError where there is nothing to go on with, nowhere to publish, or somebody else does."""
    if is_running(run_dir):
        raise UserError(f"{run_dir} is being written by another process: it still goes on")
    for path in (run_dir / "snapshots", run_dir / "checkpoints"):
        if path.exists() and not (path.is_dir() and os.access(path, os.W_OK)):
            raise UserError(f"{path}: must be a directory that can be written")
    if is_finished(run_dir) and (run_dir / "summary.json").is_file():
        raise UserError(f"{run_dir} is finished: there is nothing to resume")


def _counts(run_dir: Path, update: int) -> dict[str, int]:
    last: dict[str, Any] = {}
    for line in _metrics(run_dir):
        last = line if line[names.STEP] <= update else last
    return {name: int(last.get(name) or 0) for name in COUNTS}


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else []


def _told(run_dir: Path) -> _Told:
    try:
        check_format(run_dir)
        return _read(entry.event for entry in merged(run_dir))
    except ValueError as error:
        raise UserError(str(error)) from error


def _read(told: Iterable[events.Event]) -> _Told:
    found = _Told({}, events.CheckpointSaved(0, 0), {}, {}, set(), set(), {}, {}, {}, set(), False)
    version = 0
    for event in told:
        match event:
            case events.VersionPublished(version, digest):
                found.digests[version] = digest
            case events.CheckpointSaved():
                found = found._replace(checkpoint=event)
            case events.RolloutStarted(key):
                group = events.GroupId(key.task, key.prompt)
                found.began.setdefault(group, version)
                found.keys.setdefault(group, set()).add(key)
                found.attempts[group] = max(key.attempt, found.attempts.get(group, 0))
            case events.RolloutLost(key) | events.RolloutDone(key):
                found.keys[events.GroupId(key.task, key.prompt)].discard(key)
            case events.GroupPut(group, oldest):
                found.put[group] = oldest
            case events.GroupDiscarded(group):
                found.discarded.add(group)
            case events.GroupDropped(group):
                found.dropped.add(group)
            case events.BatchTaken(step):
                found.batches[step] = event
            case events.Evaluated(when):
                found.evaluated.add(when)
            case events.RunEnded(reason):
                found = found._replace(finished=reason == "finished")
    return found


def _groups(run_dir: Path, told: _Told, update: int) -> dict[events.GroupId, Group]:
    """Those in the queue and in batches after the checkpoint, in the order they were put. One that
    was put right when the process was killed is in the trajectory log alone."""
    done = told.trained(update) | told.dropped
    wanted = {name for name in told.put if name not in done}
    found: dict[events.GroupId, Group] = {}
    for group, _ in read_groups(run_dir):
        name = events.group_id(group)
        if name in wanted or name not in told.put:
            found[name] = group
            told.put.setdefault(name, group.oldest_version)
    if missing := wanted - found.keys():
        raise UserError(f"{run_dir}: the trajectory log lacks the group {min(missing)}")
    return found
