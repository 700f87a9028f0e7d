"""Bounds by hand, and that what comes after them does not look at the ratio's gradient."""

import math

import numpy as np
import pytest

from rl_jax.losses.bounds import clamp, truncate, weigh
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import importance_sampled, policy_gradient
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.types import LossTransform
from tests.losses.terms import applied, gradient, numbers, scores

RATIOS = [0.25, 1.0, 8.0]
GIVEN = scores([0.0] * 4, -np.log([*RATIOS, 100.0]), mask=[True] * 3 + [False])


@pytest.mark.parametrize(
    ("bound", "want", "metrics"),
    [
        (truncate(2.0), [0.25, 1.0, 2.0], {"truncate/above": 1 / 3}),
        (clamp(0.5, 2.0), [0.5, 1.0, 2.0], {"clamp/below": 1 / 3, "clamp/above": 1 / 3}),
        (clamp(None, 2.0), [0.25, 1.0, 2.0], {"clamp/above": 1 / 3}),
        (clamp(0.5, None, name="floor"), [0.5, 1.0, 8.0], {"floor/below": 1 / 3}),
    ],
)
def test_bounds(bound: LossTransform, want: list[float], metrics: dict[str, float]) -> None:
    both = chain(current_over_behavior(), bound)
    terms, said = applied(both, GIVEN)
    np.testing.assert_allclose(np.exp(terms.log_ratio)[0], [*want, 1.0], rtol=1e-6)
    own = {name: value for name, value in numbers(said).items() if not name.startswith("ratio/")}
    assert own == pytest.approx(metrics)
    # Detached: only the score function has a gradient, with the bounded ratio as its weight.
    assert not gradient(chain(both, importance_sampled()), GIVEN).any()
    slope = -gradient(chain(both, weigh(), policy_gradient()), GIVEN)
    np.testing.assert_allclose(slope, [*want, 0.0], rtol=1e-6)


def test_weights_multiply() -> None:
    twice = chain(current_over_behavior(), weigh(), truncate(2.0), weigh(name="again"))
    terms, metrics = applied(twice, GIVEN)
    np.testing.assert_allclose(terms.factor[0, :3], [0.25**2, 1.0, 16.0], rtol=1e-6)
    assert numbers(metrics)["weigh/mean"] == pytest.approx((0.25 + 1 + 8) / 3)
    assert numbers(metrics)["again/mean"] == pytest.approx((0.0625 + 1 + 16) / 3)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: truncate(0.0), "truncate: cap must be positive and finite, got 0.0"),
        (lambda: truncate(math.nan), "truncate: cap must be positive and finite, got nan"),
        (lambda: clamp(None, None), "clamp: needs low, high or both, got neither"),
        (lambda: clamp(2.0, 0.5), "clamp: low must be below high, got 2.0 and 0.5"),
        (lambda: clamp(-1.0, 0.5), "clamp: low must be positive and finite, got -1.0"),
    ],
)
def test_bounds_that_make_no_sense(make: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()  # type: ignore[operator]
