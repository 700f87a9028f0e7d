"""[H] A run as its report reads it from the disk, whether it has ended, goes on or was killed."""

import fcntl
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.report.numbers import Lines, Row, known_fates, row, settled, state
from rl_jax.config.base import UserError
from rl_jax.metrics import names
from rl_jax.metrics.trace import FOLDER, Span, read_spans
from rl_jax.metrics.writers import read as read_metrics
from rl_jax.replay.events import Event
from rl_jax.replay.fates import Recorded
from rl_jax.replay.journal import LOCK
from rl_jax.replay.log import Entry, merged
from rl_jax.replay.trajectory_log import read_trajectories
from rl_jax.trajectories.types import Trajectory

RUNNING = "running.json"
"""Tells who runs a run, and is locked by it (`launch/operate/running.py`)."""
Label = Callable[[Trajectory], str]
"""What kind of task a trajectory was at, as in "hops=3"."""


@dataclass(frozen=True)
class RunData:
    """Everything but the tokens."""

    name: str
    state: str
    """running, finished, stopped or killed."""
    config_text: str
    config: Mapping[str, Any]
    lines: Lines
    """Of the metrics, one an update; where a resumed run did an update again, the last."""
    events: Sequence[Event]
    rows: Sequence[Row]
    """Every trajectory but padding copies, in the order of the trajectory logs."""
    spans: Sequence[Span]

    @property
    def tau(self) -> int | None:
        return self.config.get("staleness", {}).get("tau")


def task_of(trajectory: Trajectory) -> str:
    """The task's name: a label that every trajectory has."""
    return trajectory.key.task


def load(run_dir: Path, label: Label = task_of) -> RunData:
    """Reads `run_dir`; a part that is not there yet is empty. Raises UserError where it is no
    run's directory, ValueError where its record is broken or of another format."""
    config_text = check_run(run_dir)
    events = tuple(entry.event for entry in entries(run_dir))
    return RunData(
        name=run_dir.resolve().name,
        state=state(events, running=is_running(run_dir)),
        config_text=config_text,
        config=tomllib.loads(config_text),
        lines=lines(run_dir),
        events=events,
        rows=tuple(row(r, label(r.trajectory)) for r in originals(run_dir, events)),
        spans=spans(run_dir),
    )


def check_run(run_dir: Path) -> str:
    """The text of its configuration, which every run has."""
    try:
        return (run_dir / "config.toml").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{run_dir} is no run: it has no config.toml; give a directory that `rl-jax run` made"
        ) from None


def entries(run_dir: Path) -> Iterator[Entry]:
    """The events of all programs in order; none where the run has no journal yet."""
    return merged(run_dir) if (run_dir / "journal").exists() else iter(())


def originals(run_dir: Path, events: Iterable[Event]) -> Iterator[Recorded]:
    """Every recorded trajectory that is no padding copy, with its fate as `events` know it."""
    fates = known_fates(events)
    recorded = read_trajectories(run_dir) if (run_dir / "trajectories").exists() else ()
    return (settled(r, fates) for r in recorded if r.trajectory.copy_of is None)


def lines(run_dir: Path) -> Lines:
    """The metrics of each update, the last that was written of it."""
    path = run_dir / "metrics.jsonl"
    told = {line[names.STEP]: line for line in (read_metrics(path) if path.exists() else ())}
    return tuple(told[step] for step in sorted(told))


def spans(run_dir: Path) -> tuple[Span, ...]:
    """Of `trace.json`, or of the programs' own traces until they are merged."""
    whole = run_dir / "trace.json"
    paths = [whole] if whole.exists() else sorted((run_dir / FOLDER).glob("*.json"))
    return tuple(sorted((span for path in paths for span in read_spans(path)), key=lambda s: s[3]))


def seconds_on_record(run_dir: Path) -> float:
    """How long the run went on before, by its last update and the last of its traces."""
    path = run_dir / "metrics.jsonl"
    written = read_metrics(path)[-1:] if path.exists() else []
    ends = [line[names.WALL_SECONDS] for line in written]
    ends += [span.end for span in spans(run_dir)]
    return float(max(ends, default=0.0))


def is_running(run_dir: Path) -> bool:
    """Whether a program of the run still writes: each holds its journal locked, and who runs all
    of them in one process, or started them, holds `RUNNING` from before there are any. Files, so
    that other hosts of a shared disk know, too."""
    return any(map(locked, (run_dir / RUNNING, *sorted(run_dir.glob(f"journal/*/{LOCK}")))))


def locked(path: Path) -> bool:
    """Whether a process holds a file; False where it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
