"""Advantages by hand: baselines over originals with a reward, each once."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.advantages import group_mean, standardised
from rl_jax.trajectories.types import Group, copy_of
from tests.trajectories.build import group, steady, trajectory


def sampled(advantages: tuple) -> list[float]:
    """Each member's advantage, read from its last token."""
    return [float(a[-1]) for a in advantages]


def test_group_mean_by_hand() -> None:
    got = group_mean(group(rewards=(1.0, 0.0, 0.0, 1.0, 1.0)))
    np.testing.assert_allclose(sampled(got), [0.4, -0.6, -0.6, 0.4, 0.4], rtol=1e-6)


def test_standardised_by_hand() -> None:
    got = standardised(group(rewards=(1.0, 0.0, 0.0, 0.0)))
    # mean 1/4, variance 3/16
    root = math.sqrt(3) / 4
    want = [0.75 / root, *[-0.25 / root] * 3]
    np.testing.assert_allclose(sampled(got), want, rtol=1e-5)


def test_epsilon_is_added_to_the_deviation() -> None:
    got = standardised(group(rewards=(1.0, 0.0)), epsilon=0.5)
    assert sampled(got) == [0.5, -0.5]


@pytest.mark.parametrize("advantage", [group_mean, standardised])
def test_only_sampled_tokens_carry_it(advantage) -> None:
    g = group(rewards=(1.0, 0.0))
    for member, array in zip(g.members, advantage(g), strict=True):
        assert array.dtype == np.float32
        assert array.shape == member.tokens.shape
        assert ((array != 0) == member.loss_mask).all()


@pytest.mark.parametrize("advantage", [group_mean, standardised])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30])
def test_equal_rewards_give_exact_zeros(advantage, reward: float) -> None:
    assert sampled(advantage(group(rewards=(reward,) * 7))) == [0.0] * 7


@pytest.mark.parametrize("advantage", [group_mean, standardised])
def test_copies_change_no_baseline_and_take_their_originals_value(advantage) -> None:
    g = group(rewards=(1.0, 0.0, 0.5))
    padded = Group(g.task, g.prompt, (*g.members, copy_of(g.members[0]), copy_of(g.members[1])))
    plain = sampled(advantage(g))
    assert sampled(advantage(padded)) == [*plain, plain[0], plain[1]]


@pytest.mark.parametrize("advantage", [group_mean, standardised])
def test_failed_members_take_no_part(advantage) -> None:
    g = group(rewards=(1.0, 0.0))
    broken = Group(g.task, g.prompt, (*g.members, trajectory(2, None)))
    assert sampled(advantage(broken)) == [*sampled(advantage(g)), 0.0]


def test_a_stale_member_is_in_the_baseline() -> None:
    g = Group("lookup", 0, (trajectory(0, 1.0, (9,)), trajectory(1, 0.0, (0,))))
    assert sampled(group_mean(g)) == [0.5, -0.5]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named(reward: float) -> None:
    with pytest.raises(ValueError, match=r"sample 1, lookup 0"):
        group_mean(group(rewards=(0.0, reward)))


@steady
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9))
def test_against_numpy(rewards: list[float]) -> None:
    r = np.array(rewards)
    got = group_mean(group(rewards=tuple(rewards)))
    np.testing.assert_allclose(sampled(got), r - r.mean(), rtol=1e-5, atol=1e-5)
    got = standardised(group(rewards=tuple(rewards)), epsilon=1e-3)
    np.testing.assert_allclose(
        sampled(got), (r - r.mean()) / (r.std() + 1e-3), rtol=1e-5, atol=1e-4
    )
