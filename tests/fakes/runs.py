"""Whole runs in this process: one set of sizes for all, a quiet reporter, what a run left."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from launch.summary import Summary
from rl_jax.config.run import RunConfig
from rl_jax.replay import events, journal
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trajectories.types import Group

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

    def phase(self, name: str, total: int | None = None) -> None: ...
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
    """What a run left."""

    def __init__(
        self, config: RunConfig, path: Path, ended: Summary | BaseException, notes: list[str]
    ) -> None:
        self.config, self.path, self.notes = config, path, notes
        self._ended = ended

    @property
    def summary(self) -> Summary:
        assert isinstance(self._ended, Summary)
        return self._ended

    @property
    def error(self) -> BaseException:
        assert isinstance(self._ended, BaseException)
        return self._ended

    def told[E: events.Event](self, kind: type[E]) -> list[E]:
        """The journal's events of one kind, in order."""
        return [e for e in self.journal() if isinstance(e, kind)]

    def journal(self) -> list[events.Event]:
        return [events.decode(e) for e in journal.read(self.path / "journal")]


def check_journal(run: Run) -> None:
    """What a journal must tell of a run that ended well; it needs nothing but itself to check."""
    put: dict[events.GroupId, int] = {}
    settled: set[events.GroupId] = set()
    versions: list[int] = []
    steps: list[int] = []
    for event in run.journal():
        match event:
            case events.VersionPublished(version, digest, step):
                versions.append(version)
                manifest = SnapshotStore(run.path / "snapshots").manifest(version)
                assert (manifest.digest, manifest.step) == (digest, step)
            case events.GroupPut(group):
                name = events.group_id(group)
                assert name not in put, "put twice"
                put[name] = group.oldest_version
            case events.GroupDropped(name, _):
                assert name in put and name not in settled
                settled.add(name)
            case events.BatchTaken(step, published, groups):
                assert published == versions[-1]
                assert list(groups) == sorted(groups, key=lambda g: (g.task, g.prompt))
                assert len(set(groups)) == len(groups) == run.config.trainer.groups
                for name in groups:
                    assert name in put and name not in settled, "trained once, after it was put"
                    settled.add(name)
                    assert published - put[name] <= run.config.staleness.tau
            case events.UpdateDone(step):
                steps.append(step)
    updates = run.config.trainer.updates
    assert steps == [e.step for e in run.told(events.BatchTaken)] == list(range(1, updates + 1))
    assert versions == list(range(len(versions))), "every version once, in order"
    assert len(run.told(events.RunStarted)) == 1


def trained_groups(run: Run) -> list[list[Group]]:
    """The groups of each batch, in its order."""
    put = {events.group_id(e.group): e.group for e in run.told(events.GroupPut)}
    return [[put[name] for name in batch.groups] for batch in run.told(events.BatchTaken)]
