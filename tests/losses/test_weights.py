"""Tokens too old to train on, and how many tokens the weights leave to learn from."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.arrays import Array
from rl_jax.losses.combine import chain
from rl_jax.losses.masks import mask_stale, masked_above
from rl_jax.losses.ratios import ess_share
from rl_jax.losses.recipes import dis
from rl_jax.losses.types import Loss, Scores
from rl_jax.metrics import names
from tests.losses.terms import applied, reported, scores, uniform
from tests.trajectories.build import steady


def gradient(loss: Loss, given: Scores) -> np.ndarray:
    def value(current: Array) -> Array:
        terms, _ = applied(loss.transform, given._replace(current=current))
        return jnp.sum(uniform(given) * terms.loss)

    return np.asarray(jax.grad(value)(given.current))[0]


def test_a_token_above_tau_has_no_gradient_and_stays_in_the_denominator() -> None:
    given = scores([-1.0] * 5, -1.0, 2.0, mask=[True] * 4 + [False], lag=[0, 2, 3, 9, 9])
    np.testing.assert_allclose(gradient(masked_above(dis(), 2), given), [-0.5, -0.5, 0.0, 0.0, 0.0])
    said = reported(masked_above(dis(), 2).transform, given)
    assert said[names.STALE_SHARE] == 0.5
    assert said["masked_above/dropped"] == said[names.MASKED_SHARE] == 0.5
    assert said["two_sided_mask/dropped"] == 0.0, "the band keeps its own count"


def test_what_is_not_stale_trains_as_without_the_mask() -> None:
    given = scores([-1.0, -0.5, -2.0], [-1.2, -0.4, -9.0], [1.0, -2.0, 3.0], lag=[0, 1, 2])
    np.testing.assert_array_equal(gradient(masked_above(dis(), 2), given), gradient(dis(), given))
    assert names.STALE_SHARE not in applied(dis().transform, given)[1]


@pytest.mark.parametrize("ratio", [math.inf, 1e4, 1.0])
def test_a_stale_token_is_masked_whatever_its_ratio(ratio: float) -> None:
    given = scores([0.0, 0.0], [-ratio, 0.0], lag=[5, 0])
    np.testing.assert_array_equal(gradient(masked_above(dis(), 4), given), [0.0, -0.5])


@settings(steady, max_examples=20)
@given(
    tau=st.integers(0, 4),
    tokens=st.lists(
        st.tuples(st.integers(0, 9), st.floats(-2, 0), st.floats(-2, 0), st.floats(-3, 3)),
        min_size=8,
        max_size=8,
    ),
)
def test_no_token_above_tau_is_ever_trained_on(
    tau: int, tokens: list[tuple[int, float, float, float]]
) -> None:
    lag, current, behavior, advantages = map(np.array, zip(*tokens, strict=True))
    given = scores(current, behavior, advantages, lag=lag)
    masked, plain = gradient(masked_above(dis(), tau), given), gradient(dis(), given)
    assert not masked[lag > tau].any()
    np.testing.assert_array_equal(masked[lag <= tau], plain[lag <= tau])


def test_masks_by_lag_stand_beside_each_other() -> None:
    """One's own, another, and those that a run puts around; told is the share of the outermost."""
    given = scores([-1.0] * 5, -1.0, lag=[0, 1, 2, 3, 4])
    own = dis()._replace(transform=chain(mask_stale(3), mask_stale(2, name="two"), dis().transform))
    said = reported(masked_above(masked_above(own, 1), 2).transform, given)
    assert said[names.STALE_SHARE] == pytest.approx(2 / 5)
    assert said["mask_stale/stale"] == pytest.approx(1 / 5)
    assert said["two/stale"] == pytest.approx(2 / 5)
    assert said["masked_above_again/dropped"] == pytest.approx(2 / 5)
    assert said["masked_above/dropped"] == pytest.approx(1 / 5)
    assert said["two/dropped"] == said["mask_stale/dropped"] == 0.0
    same = reported(masked_above(masked_above(dis(), 1), 1).transform, given)
    assert same[names.STALE_SHARE] == same[names.MASKED_SHARE] == pytest.approx(3 / 5)


def test_a_negative_tau_is_refused() -> None:
    with pytest.raises(ValueError, match="tau must be at least 0, got -1"):
        mask_stale(-1)


# --- effective sample size -----------------------------------------------------------------------


def test_moments_of_the_weights_after_masking() -> None:
    """Ratios 2, 1, 9 and 1: the third is above the band, the last too old, a fifth not sampled."""
    given = scores(
        [0.0] * 5,
        -np.log([2.0, 1.0, 9.0, 1.0, 1.0]),
        mask=[True] * 4 + [False],
        lag=[0, 1, 0, 3, 0],
    )
    said = reported(masked_above(dis(), 2).transform, given)
    assert said[names.ESS_WEIGHT] == pytest.approx((2 + 1) / 4)
    assert said[names.ESS_WEIGHT_SQUARED] == pytest.approx((4 + 1) / 4)
    share = ess_share(said[names.ESS_WEIGHT], said[names.ESS_WEIGHT_SQUARED])
    assert share == pytest.approx(9 / 16 / (5 / 4)), "1.8 tokens of 4"


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_moments_stay_finite_under_huge_ratios(log_ratio: float) -> None:
    said = reported(dis().transform, scores([0.0, 0.0], [-log_ratio, 0.0]))
    assert (said[names.ESS_WEIGHT], said[names.ESS_WEIGHT_SQUARED]) == (0.5, 0.5)
    assert ess_share(0.5, 0.5) == 0.5


def test_without_any_weight_the_share_is_0() -> None:
    assert ess_share(0.0, 0.0) == 0.0


@steady
@given(st.lists(st.floats(0.01, 6.0), min_size=1, max_size=20))
def test_the_share_lies_between_one_token_and_all(weights: list[float]) -> None:
    own = np.float32(weights)
    share = float(ess_share(float(own.mean()), float(np.square(own).mean())))
    assert 1 / len(own) - 1e-5 <= share <= 1 + 1e-5
    assert float(ess_share(float(own[0]), float(own[0]) ** 2)) == pytest.approx(1.0)
