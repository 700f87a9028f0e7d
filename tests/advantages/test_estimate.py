"""What `estimate` answers to results and estimates that do not fit."""

from collections.abc import Callable

import numpy as np
import pytest

from rl_jax.advantages import Advantage, Estimates, PerToken, estimate, gae, group_mean, vtrace
from rl_jax.trajectories.types import Group
from tests.trajectories.build import group

OWN = group(rewards=(1.0, 0.0))
"""Two members of three tokens, the first not sampled."""


def full(value: float = 0.5, tokens: int = 3, dtype: type = np.float32) -> PerToken:
    return (np.full(tokens, value, dtype), np.full(tokens, value, dtype))


def of_rewards(arrays: object) -> Callable:
    def mine(own: Group, estimates: Estimates) -> object:
        return arrays

    return mine


def refused(advantage: Advantage, estimates: Estimates) -> str:
    with pytest.raises(ValueError) as caught:
        estimate(advantage, [OWN], [estimates])
    return str(caught.value)


WRONG = [
    (full(tokens=2), "2 entries for 3 tokens of RolloutKey"),
    (full(dtype=np.float64), r"float64[3] for RolloutKey"),
    ((np.zeros((3, 1), np.float32),) * 2, "float32[3, 1] for RolloutKey"),
    ((0.5, -0.5), "float for RolloutKey"),
    (full()[:1], "1 arrays for 2 members"),
    (None, "NoneType; a tuple with one array per member expected"),
    (full(np.nan), "a number that is not finite for RolloutKey"),
    (full(np.inf), "a number that is not finite for RolloutKey"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG)
def test_a_wrong_result_names_the_function(arrays: object, message: str) -> None:
    assert refused(Advantage(of_rewards(arrays)), Estimates()).startswith("of_rewards: " + message)
    returning = group_mean()._replace(returns=of_rewards(arrays))
    assert refused(returning, Estimates()).startswith("returns of of_rewards: " + message)
    over_batch = group_mean()._replace(over_batch=lambda groups, advantages: [arrays])
    assert message in refused(over_batch, Estimates())


@pytest.mark.parametrize(("arrays", "message"), WRONG[:2] + WRONG[-2:])
def test_a_wrong_estimate_names_the_field_and_who_needs_it(arrays: PerToken, message: str) -> None:
    assert refused(gae(), Estimates(values=arrays)).startswith("values for gae: " + message)
    got = refused(vtrace(), Estimates(values=full(), log_ratios=arrays))
    assert got.startswith("log_ratios for vtrace: " + message)


def test_missing_estimates_are_named() -> None:
    assert refused(gae(), Estimates()).startswith("gae: needs values, which")
    assert refused(vtrace(), Estimates(values=full())).startswith("vtrace: needs log_ratios, which")


def test_an_estimate_that_does_not_exist_is_named() -> None:
    asks = group_mean()._replace(needs=frozenset({"entropy"}))
    assert refused(asks, Estimates()) == (
        "group_mean: needs entropy; there are values and log_ratios"
    )


def test_what_lies_outside_the_mask_is_cleared() -> None:
    arrays = full(0.5)
    for array in arrays:
        array[0] = np.nan
    own = Advantage(of_rewards(arrays), returns=of_rewards(arrays))
    for result in estimate(own, [OWN], [Estimates()]):
        assert [a.tolist() for a in result[0]] == [[0.0, 0.5, 0.5]] * 2


def test_without_returns_there_are_zeros() -> None:
    _, returns = estimate(group_mean(), [OWN, OWN], [Estimates()] * 2)
    assert [[a.tolist() for a in own] for own in returns] == [[[0.0] * 3] * 2] * 2
    assert {a.dtype for own in returns for a in own} == {np.dtype(np.float32)}
