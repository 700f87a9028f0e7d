"""Whole runs in this process: one set of sizes for all, a quiet reporter, what a run left."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from launch.replay import Comparison, read_recording, replay
from launch.report.data import originals
from launch.summary import Summary, summarise
from rl_jax.config.run import RunConfig
from rl_jax.replay import events
from rl_jax.replay.fates import OPEN, Fate, Kind
from rl_jax.replay.log import merged
from rl_jax.replay.trajectory_log import read_groups, read_trajectories
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trajectories.types import Group, RolloutKey, Status

BASE: dict[str, Any] = {
    "name": "t",
    "seed": 3,
    "model": {
        "width": 32, "layers": ["kda", "mla"], "heads": 4, "head_dim": 8, "ffn": 48,
        "kv_latent": 16, "kv_shared_key": 8,
    },
    "warm_start": {"steps": 0},
    "trainer": {
        "updates": 3, "groups": 2, "group_size": 4, "push_every": 1, "learning_rate": 1e-2,
        "row_length": 128, "rows_per_microbatch": 4,
    },
    "advantage": {"name": "group_mean"},
    "staleness": {"tau": 2},
    "sampler": {
        "slots": 16, "prefill_rows": 4, "prefill_tokens": [64], "max_context": 128, "sessions": 16,
    },
    "rollout": {"in_flight": 16, "max_new_tokens": 8, "max_turns": 4, "ahead": 1.0},
    "evaluation": {"questions": 8},
    "deadlines": {"queue_get_s": 60.0, "put_s": 60.0, "step_s": 60.0},
}  # fmt: skip
"""Every run's sizes, so that all share their programs."""


def config(**sections: dict[str, Any]) -> RunConfig:
    """BASE with some keys replaced."""
    merged = {k: v | sections.get(k, {}) if isinstance(v, dict) else v for k, v in BASE.items()}
    return RunConfig.model_validate(merged | {k: v for k, v in sections.items() if k not in BASE})


class Quiet:
    """A `Reporter` that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None: ...
    def progress(self, done: int, **numbers: float) -> None: ...
    def update(self, metrics: Any) -> None: ...
    def close(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


COMPILED: dict[Any, Any] = {}


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*args: Any) -> Any:
        name = (function.__name__, *key(*args))
        if name not in COMPILED:
            COMPILED[name] = function(*args)
        return COMPILED[name]

    return wrapped


class Run:
    """What a run left so far."""

    def __init__(
        self, config: RunConfig, path: Path, error: BaseException | None, notes: list[str]
    ) -> None:
        self.config, self.path, self.notes = config, path, notes
        self._error = error
        self._kept: dict[str, tuple[Any, Any]] = {}

    @property
    def error(self) -> BaseException:
        assert self._error is not None
        return self._error

    @property
    def summary(self) -> Summary:
        return summarise(self.path, self.config.seed)

    def journal(self) -> list[events.Event]:
        """Of all programs, in the order of cause and effect."""
        return self._read("journal", lambda: [entry.event for entry in merged(self.path)])

    def told[E: events.Event](self, kind: type[E]) -> list[E]:
        """The journal's events of one kind, in order."""
        return [e for e in self.journal() if isinstance(e, kind)]

    def groups(self) -> dict[events.GroupId, tuple[Group, Fate]]:
        """Every group that was put, from the trajectory log."""
        read = self._read("trajectories", lambda: list(read_groups(self.path)))
        found = {events.group_id(group): (group, fate) for group, fate in read}
        assert len(found) == len(read), "each once"
        return found

    def _read[T](self, folder: str, read: Callable[[], T]) -> T:
        """What `read` gives, once for as long as no file in the folder changes."""
        files = [(path, path.stat()) for path in sorted((self.path / folder).rglob("*"))]
        state = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files]
        if folder not in self._kept or self._kept[folder][0] != state:
            self._kept[folder] = state, read()
        return self._kept[folder][1]

    def failures(self) -> dict[RolloutKey, str]:
        """The reason of every rollout that the environment broke."""
        recorded = read_trajectories(self.path)
        return {
            r.trajectory.key: r.trajectory.reason for r in recorded if r.fate.kind is Kind.FAILED
        }


def check_journal(run: Run, *, killed: bool = False) -> None:
    """What a journal must tell of a run that ended well, in one go or in several; `killed` where a
    process had no time to write what it still held."""
    put: dict[events.GroupId, int] = {}
    settled: set[events.GroupId] = set()
    versions: list[int] = []
    steps: list[int] = []
    store = SnapshotStore(run.path / "snapshots")
    for event in run.journal():
        match event:
            case events.VersionPublished(version, digest, step):
                versions.append(version)
                manifest = store.manifest(version)
                assert (manifest.digest, manifest.step) == (digest, step)
            case events.GroupPut(name, oldest_version):
                assert name not in put, "put twice"
                put[name] = oldest_version
            case events.GroupDropped(name, _):
                assert name in put and name not in settled
                settled.add(name)
            case events.BatchTaken(step, published, groups):
                steps.append(step)
                # Its digest is on record just before a version is out.
                assert versions[-1] - 1 <= published <= versions[-1]
                assert list(groups) == sorted(groups, key=lambda g: (g.task, g.prompt))
                assert len(set(groups)) == len(groups) == run.config.trainer.groups
                for name in groups:
                    assert name in put and name not in settled, "trained once, after it was put"
                    settled.add(name)
                    masks = run.config.staleness.when_stale == "mask"
                    assert masks or published - put[name] <= run.config.staleness.tau
    updates = run.config.trainer.updates
    assert steps == list(range(1, updates + 1))
    assert [*dict.fromkeys(e.step for e in run.told(events.UpdateDone))] == steps
    assert versions == list(range(len(versions))), "every version once, in order"
    check_rollouts(run)
    check_trajectories(run, killed=killed)


def check_rollouts(run: Run) -> None:
    """Every rollout is started once and ends once, or was cancelled; no prompt is left out."""
    started = [e.key for e in run.told(events.RolloutStarted)]
    assert len(set(started)) == len(started), "issued once"
    ended = [e.key for e in run.told(events.RolloutDone)]
    ended += [e.key for e in run.told(events.RolloutLost)]
    assert len(set(ended)) == len(ended) and set(ended) <= set(started), "ends once"
    prompts = {key.prompt for key in started}
    assert prompts == set(range(len(prompts))), "none is skipped"
    put = [e.group.prompt for e in run.told(events.GroupPut)]
    given_up = [e.group.prompt for e in run.told(events.GroupDiscarded)]
    once = put + given_up
    assert len(set(once)) == len(once), "none is repeated"
    cancelled = {key.prompt for key in set(started) - set(ended)}
    under_way = prompts - set(once)
    assert cancelled <= under_way | set(given_up), "all rollouts of a group that was put ended"
    assert len(under_way) * run.config.trainer.group_size <= run.config.rollout.in_flight


def check_trajectories(run: Run, *, killed: bool = False) -> None:
    """Each rollout that ended is in the trajectory log once, with the fate the journal tells. Where
    a process was `killed`, one of a group that was not put yet may be missing."""
    fates: dict[RolloutKey, Fate] = {}
    for trajectory, fate, _ in originals(run.path, run.journal()):
        if fate.kind is not Kind.EVALUATED:
            assert trajectory.key not in fates, "once"
            fates[trajectory.key] = fate
    done = {e.key: e for e in run.told(events.RolloutDone)}
    assert fates.keys() <= done.keys() if killed else fates.keys() == done.keys()
    put, groups = {e.group for e in run.told(events.GroupPut)}, run.groups()
    # The end of a run may come between a group's tokens and the event that it was put.
    assert put <= groups.keys()
    assert all(groups[name][1] == OPEN for name in groups.keys() - put)
    for key, fate in fates.items():
        assert (fate.kind is Kind.FAILED) == (done[key].status == Status.FAILED)
    trained = {g: e.step for e in run.told(events.BatchTaken) for g in e.groups}
    dropped = {e.group: e.reason for e in run.told(events.GroupDropped)}
    for name, (group, fate) in groups.items():
        told = Fate(Kind.DROPPED, reason=dropped[name]) if name in dropped else OPEN
        told = Fate(Kind.TRAINED, trained[name]) if name in trained else told
        assert fate in (told, OPEN), "open while its interval is not sealed"
        assert all(fates[m.key] == told for m in group.members)


def trained_groups(run: Run) -> list[list[Group]]:
    """The groups of each batch, in its order."""
    put = run.groups()
    return [[put[name][0] for name in batch.groups] for batch in run.told(events.BatchTaken)]


def replayed(run: Run) -> Comparison:
    """Every update again, by the record."""
    return replay(run.config, run.path, Quiet(), read_recording(run.path))
