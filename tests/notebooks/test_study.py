"""The shipped run, opened for study: what it recorded comes out again."""

import json
import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.study import ScoredBatch, Study, open_run
from rl_jax import advantages, losses
from rl_jax.config.base import UserError
from rl_jax.losses.types import ENTROPY, PROXIMAL, REFERENCE, VALUE
from rl_jax.trajectories.lineage import pure
from tests.notebooks.execute import FOLDER, ROOT

RECORDED = FOLDER / "recorded"
SEEN = 5
"""An update that came right after a push: its policy is a version."""


@cache
def study() -> Study:
    return open_run(RECORDED)


@cache
def seen() -> ScoredBatch:
    return study().batch(SEEN)


def told() -> dict[str, float]:
    lines = map(json.loads, (RECORDED / "metrics.jsonl").read_text().splitlines())
    return next(line for line in lines if line["step"] == SEEN)


def norm(tree) -> float:
    return float(np.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree))))


def test_it_is_small_and_says_nothing_of_the_machine() -> None:
    files = [path for path in RECORDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    for path in files:
        assert not [w for w in (b"/root/", b"/home/", b"/tmp/") if w in path.read_bytes()], path


def test_it_is_visibly_off_policy() -> None:
    batch = seen()
    mask = np.asarray(batch.scores.mask)
    moved = np.asarray(batch.scores.current - batch.scores.behavior)[mask]
    assert 0.1 < np.abs(moved).mean() < 0.3
    assert np.abs(moved).max() > 2.0
    assert len(np.unique(np.asarray(batch.scores.lag)[mask])) > 1


def test_the_recorded_loss_and_gradient_come_out_again() -> None:
    judged = study().judge(study().loss, seen())
    recorded = told()
    np.testing.assert_allclose(judged.loss, recorded["loss"], rtol=1e-4)
    np.testing.assert_allclose(norm(judged.params), recorded["grad_norm"], rtol=1e-4)
    for name in ("masked_share", "two_sided_mask/dropped", "ratio_mean", "ess/weight"):
        np.testing.assert_allclose(judged.metrics[name], recorded[name], rtol=1e-4, atol=1e-7)
    mask = np.asarray(seen().scores.mask)
    np.testing.assert_allclose(np.asarray(seen().scores.lag)[mask].mean(), recorded["lag_mean"])


def test_the_gradient_is_the_slope_of_the_value() -> None:
    """Along itself, by central differences, for a loss that looks at entropy and reference."""
    parts = losses.policy_gradient(), losses.entropy_bonus(0.01), losses.kl(coefficient=0.1)
    transform = losses.chain(losses.current_over_behavior(), *parts)
    loss = losses.Loss(transform, losses.sequence_mean_token_mean)
    run, batch = study(), seen()
    assert len(batch.parts) == 1
    gradient, params = run.judge(loss, batch).params, run.params(batch.current)
    length = norm(gradient)

    def value(step: float) -> float:
        moved = jax.tree.map(lambda p, g: p + step / length * g, params, gradient)
        logprobs, entropy = run._score(moved, batch.parts[0])
        others = {**batch.scores.others, ENTROPY: jnp.where(batch.scores.mask, entropy, 0.0)}
        current = jnp.where(batch.scores.mask, logprobs, 0.0)
        scores = batch.scores._replace(current=current, others=others)
        terms, _ = losses.evaluate(transform, scores)
        return float(np.sum(np.float64(batch.weights(loss)) * np.float64(terms.loss)))

    def slope(step: float) -> float:
        return (value(step) - value(-step)) / (2 * step)

    # The policy is sharp: what a step of this size adds by its square is taken out (Richardson).
    np.testing.assert_allclose((4 * slope(5e-4) - slope(1e-3)) / 3, length, rtol=1e-3)


def test_fresh_tokens_have_the_log_probability_they_were_sampled_with() -> None:
    batch = study().batch(1)
    compared = 0
    for number, trajectory in enumerate(batch.trajectories):
        fresh = (trajectory.versions == batch.current) & pure(trajectory)
        moved = batch.of(batch.scores.current - batch.scores.behavior, number)[fresh]
        assert np.all(np.abs(moved) < 1e-4)
        compared += int(fresh.sum())
    assert compared > 0


def test_scores_and_trajectories_are_aligned() -> None:
    batch = seen()
    for number, trajectory in enumerate(batch.trajectories):
        np.testing.assert_array_equal(batch.of(batch.scores.mask, number), trajectory.loss_mask)
        own = np.where(trajectory.loss_mask, trajectory.behavior_logprobs, 0.0)
        np.testing.assert_array_equal(batch.of(batch.scores.behavior, number), own)
    assert set(batch.scores.others) == {PROXIMAL, REFERENCE, ENTROPY}
    np.testing.assert_array_equal(batch.scores.others[PROXIMAL], batch.scores.current)
    sampled = np.asarray(batch.scores.others[ENTROPY])[np.asarray(batch.scores.mask)]
    assert np.all(sampled >= 0.0) and sampled.max() < np.log(study().model.vocab_size)


def test_other_versions_may_be_asked_for() -> None:
    batch = study().batch(SEEN, current=3, proximal=1)
    own = study().batch(SEEN, current=1)
    np.testing.assert_array_equal(batch.scores.others[PROXIMAL], own.scores.current)
    np.testing.assert_array_equal(batch.scores.others[REFERENCE], own.scores.others[REFERENCE])
    assert not np.array_equal(batch.scores.current, own.scores.current)
    np.testing.assert_array_equal(batch.scores.behavior, seen().scores.behavior)


def test_another_advantage_may_be_asked_for() -> None:
    batch = study().batch(SEEN, advantage=advantages.group_mean())
    groups = study().groups(SEEN)
    first = [m.reward for m in groups[0].members]
    own = batch.of(batch.scores.advantages, 0)[batch.trajectories[0].loss_mask]
    np.testing.assert_allclose(own, first[0] - np.mean(first), rtol=1e-6, atol=1e-7)


def test_what_the_record_has_not() -> None:
    run = study()
    with pytest.raises(UserError, match=r"recorded has no update 99; it has \[1, 2, 3"):
        run.batch(99)
    with pytest.raises(UserError, match=r"recorded has no version 77; it has \[0, 1, 2, 3\]"):
        run.batch(SEEN, current=77)
    with pytest.raises(ValueError, match="values"):
        run.batch(SEEN, advantage=advantages.gae())
    with pytest.raises(ValueError, match=f"the batch lacks the score '{VALUE}'"):
        run.judge(losses.recipes.critic(), seen())
    with pytest.raises(UserError, match="is no run: it has no config"):
        open_run(FOLDER)


@pytest.mark.slow
def test_it_replays() -> None:
    """Bit for bit where the numerics are those of the machine that recorded it, to its end
    everywhere."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "replay", str(RECORDED)],
        cwd=ROOT, capture_output=True, text=True, env=own,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 updates and 4 versions rebuilt" in done.stdout
