"""Single rollouts with a critic and anchors: killed, resumed and replayed, all bit for bit.

Every digest of the policy hangs on the critic's weights by way of the advantages, and on the
proximal policy and the average by way of the loss.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from launch import build
from rl_jax.config.run import RunConfig
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import importance_sampled
from rl_jax.losses.penalties import squared_log_ratio
from rl_jax.losses.ratios import current_over_proximal, ratio
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import CURRENT, Loss, ema
from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.replay import events
from tests.drills.test_resume import killed
from tests.fakes.runs import Run, check_journal, config, replayed
from tests.integration.conftest import Start

AVERAGE = ema(0.5, 0.2)


@cache
def anchored() -> Loss:
    """The update is weighed by current / proximal and held back by current / average."""
    parts = current_over_proximal(), importance_sampled(), ratio(CURRENT, AVERAGE)
    return Loss(chain(*parts, squared_log_ratio(0.5)), token_mean)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Six updates of four single rollouts; the policy rests in the first."""
    monkeypatch.setattr(build, "build_loss", lambda config: anchored())
    return config(
        trainer={"updates": 6, "groups": 4, "group_size": 1, "push_every": 1},
        advantage={"name": "length_adaptive_gae"},
        critic={"warmup_updates": 1, "learning_rate": 1e-2, "frozen": ["trunk.blocks.*.mixer*"]},
        checkpoint={"every": 2},
    )


def digests(run: Run) -> list[str]:
    return [e.digest for e in run.told(events.VersionPublished)]


@pytest.mark.slow
def test_killed_and_resumed_and_replayed(
    start: Start, monkeypatch: pytest.MonkeyPatch, own: RunConfig
) -> None:
    """Died in update 5 after the critic was trained on its batch; a checkpoint is of update 2, and
    that of update 4 was under way."""
    run = killed(start, monkeypatch, own, 5)
    assert [e.step for e in run.told(events.CheckpointSaved)] in ([2], [2, 4])
    before = digests(run)
    run = start(own, path=run.path)
    check_journal(run)
    said: dict[int, events.UpdateDone] = {}
    told = run.told(events.UpdateDone)
    assert all(said.setdefault(e.step, e) == e for e in told), "an update done twice is the same"
    assert digests(run)[: len(before)] == before
    assert len(set(digests(run))) == 6 == len(digests(run)) - 1, "only the warm-up moved nothing"
    assert digests(run)[0] == digests(run)[1]
    done = replayed(run)
    assert (done.first_difference, done.updates, done.versions) == ("", 6, 7)
    lines = read(run.path / "metrics.jsonl")
    assert lines[0][names.CRITIC_LOSS] > 0 and lines[0][names.CRITIC_GRAD_NORM] > 0
    assert all(np.isfinite(line[names.CRITIC_EXPLAINED_VARIANCE]) for line in lines)


def test_another_critic_is_found(start: Start, monkeypatch: pytest.MonkeyPatch, own: Any) -> None:
    """A replay whose critic starts with one other number differs once the policy moves."""
    run = start(own)
    compile_step = build.compile_step

    def compiled(*args: Any) -> build.StepProgram:
        made = compile_step(*args)

        def init(params: Any, teachers: Any) -> Any:
            state = made.init(params, teachers)
            state.params["critic"]["head"]["bias"] += 0.125
            return state

        return made._replace(init=init)

    monkeypatch.setattr(build, "compile_step", compiled)
    assert replayed(run).first_difference.startswith("update 1: loss ")
