"""Ratios by hand: which two policies, at which level, with whose gradient."""

import math

import numpy as np
import pytest

from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import importance_sampled
from rl_jax.losses.ratios import (
    current_over_behavior,
    current_over_proximal,
    proximal_over_behavior,
    ratio,
)
from rl_jax.losses.types import LossTransform, Scores, ema
from tests.losses.terms import applied, gradient, numbers, scores

CURRENT, BEHAVIOR, PROXIMAL = [-1.0, -2.0, -0.5], [-1.5, -1.0, -0.25], [-1.2, -1.6, -0.4]
GIVEN = scores(CURRENT, BEHAVIOR, proximal=PROXIMAL)


def log_ratio(transform: LossTransform, given: Scores) -> list[float]:
    return applied(transform, given)[0].log_ratio[0].tolist()


def slope(transform: LossTransform, given: Scores) -> np.ndarray:
    """-d loss / d log p of r A at A = 1: the ratio where its gradient is that of log p."""
    return -gradient(chain(transform, importance_sampled()), given)


@pytest.mark.parametrize(
    ("made", "want"),
    [
        (current_over_behavior(), [0.5, -1.0, -0.25]),
        (current_over_proximal(), [0.2, -0.4, -0.1]),
        (proximal_over_behavior(), [0.3, -0.6, -0.15]),
        (ratio("behavior", "current"), [-0.5, 1.0, 0.25]),
    ],
)
def test_each_pair_of_policies(made: LossTransform, want: list[float]) -> None:
    np.testing.assert_allclose(log_ratio(made, GIVEN), want, rtol=1e-6)


def test_only_the_current_policy_carries_a_gradient() -> None:
    np.testing.assert_allclose(
        slope(current_over_proximal(), GIVEN), np.exp([0.2, -0.4, -0.1]), rtol=1e-6
    )
    assert slope(proximal_over_behavior(), GIVEN).tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(
        slope(ratio("behavior", "current"), GIVEN), -np.exp([-0.5, 1.0, 0.25]), rtol=1e-6
    )


# Two trajectories, of log-ratios (0.5, masked, -1.0) and (0.2).
SPLIT = scores(
    [-1.0, math.inf, -2.0, -1.0],
    [-1.5, math.nan, -1.0, -1.2],
    mask=[True, False, True, True],
    segments=[0, 0, 0, 1],
)


@pytest.mark.parametrize(
    ("level", "want"),
    [
        ("token", [0.5, -1.0, 0.2]),
        ("geometric", [-0.25] * 2 + [0.2]),
        ("sequence", [-0.5] * 2 + [0.2]),
    ],
)
def test_levels_are_over_the_sampled_tokens_of_a_trajectory(level: str, want: list[float]) -> None:
    made = current_over_behavior(level=level)
    got = log_ratio(made, SPLIT)
    np.testing.assert_allclose([got[0], got[2], got[3]], want, rtol=1e-5)
    assert got[1] == 0.0
    # Straight through: the gradient is the token's own, as large as the level's ratio.
    first, other, third, last = slope(made, SPLIT)
    np.testing.assert_allclose([first, third, last], np.exp(want), rtol=1e-5)
    assert other == 0.0


def test_a_ratio_that_is_cut_has_no_gradient() -> None:
    far = scores([0.0, -30.0, 0.0], [-30.0, 0.0, -1.0])
    assert log_ratio(current_over_behavior(), far) == [20.0, -20.0, 1.0]
    np.testing.assert_allclose(slope(current_over_behavior(), far), [0, 0, math.e], rtol=1e-6)
    sums = scores([0.0, 0.0], [-15.0, -15.0])
    assert log_ratio(current_over_behavior(level="sequence"), sums) == [20.0, 20.0]
    assert slope(current_over_behavior(level="sequence"), sums).tolist() == [0.0, 0.0]
    assert log_ratio(current_over_behavior(level="geometric"), sums) == [15.0, 15.0]


def test_the_proximal_policy_lies_between_by_version() -> None:
    given = scores([-1.0] * 3, [-2.0] * 3, lag=[0, 1, 3])
    # log prox - log mu = lag / (lag + 1), current - prox the rest of 1.
    mismatch, moved = (
        proximal_over_behavior(interpolated=True),
        current_over_proximal(interpolated=True),
    )
    assert not mismatch.needs | moved.needs
    np.testing.assert_allclose(log_ratio(mismatch, given), [0, 1 / 2, 3 / 4], rtol=1e-6)
    np.testing.assert_allclose(log_ratio(moved, given), [1, 1 / 2, 1 / 4], rtol=1e-6)
    assert slope(mismatch, given).tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(slope(moved, given), np.exp([1, 1 / 2, 1 / 4]), rtol=1e-6)


def test_metrics_say_what_was_compared() -> None:
    given = scores([-1.0, -1.0, 9.0], [-1.5, 0.0, 9.0], mask=[True, True, False])
    said = numbers(applied(current_over_behavior(), given)[1])
    assert said == {
        "ratio/current_behavior/mean": pytest.approx((math.exp(0.5) + math.exp(-1)) / 2),
        "ratio/current_behavior/log_abs": pytest.approx(0.75),
        "ratio/current_behavior/log_squared": pytest.approx((0.25 + 1) / 2),
    }
    average = ema(0.9, 0.5)
    given = given._replace(others={average: given.behavior})
    assert "ratio/current_ema_0_9_0_5/mean" in applied(ratio("current", average), given)[1]
    named = applied(current_over_behavior(name="mine"), given)[1]
    assert named.keys() == {"mine/mean", "mine/log_abs", "mine/log_squared"}


def test_needs_are_the_scores_it_compares() -> None:
    assert current_over_behavior().needs == frozenset()
    assert proximal_over_behavior().needs == {"proximal"}
    with pytest.raises(ValueError, match=r"current_over_proximal: the batch lacks .* 'proximal'"):
        applied(current_over_proximal(), scores([0.0], [0.0]))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"numerator": "old"}, "old_over_behavior: there is no score 'old'"),
        ({"denominator": "current"}, "ratio: numerator and denominator are both 'current'"),
    ],
)
def test_wrong_pairs_are_refused(arguments: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ratio(**arguments)
