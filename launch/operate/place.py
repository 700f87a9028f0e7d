"""[H] What a user points at: a run's directory, or the one that its launch was rendered into."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from launch.role import read_plan
from launch.spec import LaunchPlan
from rl_jax.config.base import UserError

STARTED = "started.json"
"""In the rendered directory: what `rl-jax run --target` started, or which babysit.sh runs now."""
SCRIPTS = {"job.sh": "slurm", "babysit.sh": "tpu-vm", "kueue.yaml": "gke"}
"""A file of a rendered directory, and the target that has it."""


class Place(NamedTuple):
    """Where a run's record is, and where its launch was rendered."""

    run_dir: Path
    """It need not be there yet, nor be on a disk of this machine."""
    rendered: Path | None
    plan: LaunchPlan | None
    target: str
    """local, or that of the rendered directory."""
    started: dict[str, Any]
    """Of STARTED; empty where the launch was not started by us."""

    @property
    def config(self) -> Path:
        """The file that the run is, or will be, made of."""
        own = self.run_dir / "config.toml"
        return own if own.is_file() or self.rendered is None else self.rendered / "config.toml"


def find(path: Path) -> Place:
    """UserError where `path` is neither a run's directory nor a rendered one."""
    for rendered in (path, path.parent):
        if not (rendered / "plan.json").is_file():
            continue
        plan = read_plan(rendered / "plan.json")
        run_dir = rendered / plan.run_dir
        if path in (rendered, run_dir):
            return Place(run_dir, rendered, plan, _target(rendered), _started(rendered))
    if not (path / "config.toml").is_file():
        raise UserError(
            f"{path} is no run: it has no config.toml; give the directory of a run, or the one "
            "that `rl-jax render` wrote"
        )
    return Place(path, None, None, "local", {})


def _target(rendered: Path) -> str:
    return next((own for name, own in SCRIPTS.items() if (rendered / name).is_file()), "local")


def _started(rendered: Path) -> dict[str, Any]:
    try:
        return json.loads((rendered / STARTED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def job_of(place: Place) -> str | None:
    """The number of the newest Slurm job: as we submitted it, or of a log that is newer, since the
    launch is gone on with by `sbatch` itself."""
    told = list(place.rendered.glob("job-*.log")) if place.rendered else []
    if place.rendered and place.started.get("job"):
        told.append(place.rendered / STARTED)
    newest = max(told, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or newest.name == STARTED:
        return place.started.get("job")
    return newest.stem.removeprefix("job-")
