"""[H] What the programs of a run share: its parts, its clocks, where they write.

A program is an async function over queues and clients; `launch/local.py` runs all of them in one
process, `launch/roles/` each in one of its own.
"""

import json
import time
from pathlib import Path
from typing import NamedTuple

from launch import build
from launch.needs import check_experts, check_frozen, check_needs
from launch.terminal import Reporter
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.gateway.renderer import Renderer
from rl_jax.model import Model
from rl_jax.orchestrator.rollout import RolloutLimits
from rl_jax.replay.log import Clock
from rl_jax.tasks.base import TaskFamily
from rl_jax.trainer.world import ALONE, World


class RunTime:
    """Seconds since the run began, the time between a stop and a resumption left out.

    One scale for every program of a machine: `began` is what `time.time()` would have been.
    """

    def __init__(self, began: float) -> None:
        self._offset = time.time() - time.perf_counter() - began

    def now(self) -> float:
        return time.perf_counter() + self._offset

    def of(self, seconds: float) -> float:
        """The run's time at `seconds` of `time.perf_counter`."""
        return seconds + self._offset


class Parts(NamedTuple):
    """What is there before anything runs."""

    config: RunConfig
    run_dir: Path
    reporter: Reporter
    family: TaskFamily
    renderer: Renderer
    model: Model
    time: RunTime
    clock: Clock
    """The logical clock of this process."""
    world: World
    """Of the trainer's processes, where this is one of several."""


def build_parts(
    config: RunConfig,
    run_dir: Path,
    reporter: Reporter,
    began: float,
    world: World = ALONE,
) -> Parts:
    """Raises UserError for what is wrong with the task, the loss or the advantage."""
    check_needs(config)
    family = build.build_task(config)
    check_questions(config, family)
    renderer = build.build_renderer(family)
    model = build.build_policy(config, renderer.vocab_size)
    check_experts(config, model)
    check_frozen(config, model)
    time = RunTime(began)
    return Parts(config, run_dir, reporter, family, renderer, model, time, Clock(), world)


def check_questions(config: RunConfig, family: TaskFamily) -> None:
    """Raises UserError where more held-out questions are wanted than the task has."""
    wanted, there = config.evaluation.questions, len(family.heldout)
    if wanted > there:
        raise UserError(
            f"evaluation.questions = {wanted}: needs at most {there}, the held-out questions of "
            f"task.name = {json.dumps(config.task.name)}"
        )


def rollout_limits(config: RunConfig, *, training: bool) -> RolloutLimits:
    """Evaluation is greedy; all other limits are those of training."""
    own = config.rollout
    return RolloutLimits(
        temperature=own.temperature if training else 0.0,
        max_new_tokens=own.max_new_tokens,
        max_turns=own.max_turns,
        tool_deadline_s=own.tool_deadline_s,
        request_deadline_s=config.deadlines.step_s,
        training=training,
    )
