"""Advantages of whole rollouts by hand and against numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.advantages import (
    Advantage,
    Estimates,
    batch_standardised,
    group_mean,
    leave_one_out,
    max_rl,
    single,
    standardised,
)
from rl_jax.trajectories.types import Group, Status
from tests.advantages.build import EVERY, GROUP_RELATIVE, cleared, last
from tests.trajectories.build import group, steady, trajectory

relative = pytest.mark.parametrize("name", GROUP_RELATIVE)


@pytest.mark.parametrize(
    ("advantage", "rewards", "want"),
    [
        (group_mean(), (1.0, 0.0, 0.0, 1.0, 1.0), [0.4, -0.6, -0.6, 0.4, 0.4]),
        # mean 1/4, variance 3/16
        (standardised(), (1.0, 0.0, 0.0, 0.0), [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
        # means of the others: 1/3, 2/3, 2/3, 1/3
        (leave_one_out(), (1.0, 0.0, 0.0, 1.0), [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        (leave_one_out(), (3.0, 1.0), [2.0, -2.0]),
        # one success of four: 1/mean - 1 and -1
        (max_rl(), (1.0, 0.0, 0.0, 0.0), [3.0, -1.0, -1.0, -1.0]),
        (max_rl(), (0.0, 0.0), [0.0, 0.0]),
        (single(), (0.75, -2.0), [0.75, -2.0]),
        (single(baseline=0.5), (0.75, -2.0), [0.25, -2.5]),
    ],
)
def test_by_hand(advantage: Advantage, rewards: tuple[float, ...], want: list[float]) -> None:
    np.testing.assert_allclose(last(advantage, group(rewards=rewards))[0], want, rtol=1e-5)


def test_epsilon_is_added_to_the_deviation() -> None:
    assert last(standardised(epsilon=0.5), group(rewards=(1.0, 0.0))) == [[0.5, -0.5]]


ORACLES = {
    "group_mean": lambda r: r - r.mean(),
    "standardised": lambda r: (r - r.mean()) / (r.std() + 1e-6),
    "leave_one_out": lambda r: np.array([x - np.delete(r, i).mean() for i, x in enumerate(r)]),
    "max_rl": lambda r: r / r.mean() - 1,
    "single": lambda r: r - 0.25,
}


@pytest.mark.parametrize("name", ORACLES)
@settings(steady, max_examples=25)
@given(rewards=st.lists(st.integers(0, 64).map(lambda n: n / 8), min_size=2, max_size=9))
def test_against_numpy(name: str, rewards: list[float]) -> None:
    if name == "max_rl" and not any(rewards):
        return
    want = ORACLES[name](np.array(rewards))
    got = last(EVERY[name], group(rewards=tuple(rewards)))[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@relative
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30])
def test_equal_rewards_give_exact_zeros(name: str, reward: float) -> None:
    assert last(EVERY[name], group(rewards=(reward,) * 7)) == [[0.0] * 7]


@relative
def test_a_rollout_alone_gets_zero(name: str) -> None:
    assert last(EVERY[name], group(rewards=(1.0,))) == [[0.0]]


def test_what_compares_within_the_group_says_so() -> None:
    inherits = batch_standardised()
    alone = batch_standardised(single())
    assert all(EVERY[name].within_group for name in GROUP_RELATIVE) and inherits.within_group
    others = (alone, *(EVERY[n] for n in ("single", "gae", "vtrace", "reinforce_plus_plus")))
    assert not any(advantage.within_group for advantage in others)


def test_a_fanned_out_rollout_counts_once() -> None:
    own = Group("lookup", 0, (*[trajectory(0, 1.0, (0,) * n) for n in (1, 2, 3)], trajectory(1, 0)))
    assert last(group_mean(), own) == [[0.5, 0.5, 0.5, -0.5]]
    assert last(leave_one_out(), own) == [[1.0, 1.0, 1.0, -1.0]]
    assert last(max_rl(), own) == [[1.0, 1.0, 1.0, -1.0]]


def test_a_failed_trajectory_of_a_rollout_gets_nothing() -> None:
    own = (trajectory(0, 1.0), trajectory(0, None), trajectory(1, 0.0))
    assert last(group_mean(), Group("lookup", 0, own)) == [[0.5, 0.0, -0.5]]
    assert last(single(), Group("lookup", 0, own)) == [[1.0, 0.0, 0.0]]


def test_a_failed_status_counts_more_than_a_reward() -> None:
    broken = replace(trajectory(1, 0.0), status=Status.FAILED)
    assert last(group_mean(), Group("lookup", 0, (trajectory(0), broken))) == [[0.0, 0.0]]


def test_truncated_stale_and_unsampled_rollouts_are_in_the_baseline() -> None:
    own = (
        trajectory(0, 1.0, (9,)),
        replace(trajectory(1, 0.5), status=Status.TRUNCATED),
        cleared(trajectory(2, 0.0)),
    )
    assert last(group_mean(), Group("lookup", 0, own)) == [[0.5, 0.0, 0.0]]


@pytest.mark.parametrize("name", EVERY)
def test_two_rewards_of_one_rollout_are_named(name: str) -> None:
    own = Group("lookup", 4, (trajectory(0, 1.0, prompt=4), trajectory(0, 0.5, prompt=4)))
    with pytest.raises(ValueError, match=r"rewards 1\.0 and 0\.5 of sample 0, lookup 4"):
        EVERY[name].of_group(own, _zeros(own))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named(name: str, reward: float) -> None:
    own = group(rewards=(0.0, reward))
    with pytest.raises(ValueError, match=r"sample 1, lookup 0"):
        EVERY[name].of_group(own, _zeros(own))


def test_a_copy_without_its_original_is_named() -> None:
    own = Group("lookup", 3, (replace(trajectory(1), copy_of=1),))
    with pytest.raises(ValueError, match="copy of sample 1, lookup 3, without its original"):
        last(single(), own)


def test_max_rl_takes_no_reward_below_zero() -> None:
    with pytest.raises(ValueError, match=r"max_rl: reward -1\.0 of sample 1, lookup 0 is below 0"):
        last(max_rl(), group(rewards=(1.0, -1.0)))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: standardised(epsilon=0.0),
            "standardised: epsilon must be positive and finite, got 0.0",
        ),
        (lambda: batch_standardised(epsilon=-1.0), "batch_standardised: epsilon"),
        (lambda: single(math.nan), "single: baseline must be finite, got nan"),
    ],
)
def test_bad_keywords_are_named(made, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()


def _zeros(own: Group) -> Estimates:
    arrays = tuple(np.zeros(len(m.tokens), np.float32) for m in own.members)
    return Estimates(arrays, arrays)
