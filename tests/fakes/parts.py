"""The parts of a run that nothing of the model is asked for, and a reporter that listens."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.programs.base import Parts, RunTime
from rl_jax.replay.log import Clock
from rl_jax.trainer.world import ALONE
from tests.fakes.chatter import family
from tests.fakes.runs import Quiet, config


class Listening(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Mapping[str, Any]] = []

    def update(self, metrics: Mapping[str, Any]) -> None:
        self.updates.append(metrics)


def parts_in(run_dir: Path) -> Parts:
    """Of a run that began now; nothing of the model is asked for."""
    unused: Any = None
    clock, task = RunTime(time.time()), family()
    return Parts(config(), run_dir, Listening(), task, unused, unused, clock, Clock(), ALONE)
