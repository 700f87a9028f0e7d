"""Weights of a batch: they sum to one, and a padding copy moves nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.losses.reductions import shares, token_mean
from rl_jax.trajectories.types import NOT_SAMPLED, Trajectory, copy_of
from tests.trajectories.build import steady, trajectory

sampled_counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def members(counts: list[int]) -> list[Trajectory]:
    """One trajectory for each number of sampled tokens."""
    return [trajectory(i, versions=(0,) * n) for i, n in enumerate(counts)]


def test_every_sampled_token_weighs_the_same() -> None:
    a, b = token_mean(members([1, 3]))
    np.testing.assert_array_equal(a, np.float32([0, 0.25]))
    np.testing.assert_array_equal(b, np.float32([0, 0.25, 0.25, 0.25]))


def test_prompt_and_tool_tokens_weigh_nothing() -> None:
    own = trajectory(versions=(0, NOT_SAMPLED, 1))
    np.testing.assert_array_equal(token_mean([own])[0], np.float32([0, 0.5, 0, 0.5]))


@steady
@given(sampled_counts, st.data())
def test_weights_sum_to_one(counts: list[int], data: st.DataObject) -> None:
    own = members(counts)
    copies = [copy_of(own[i]) for i in data.draw(st.lists(st.integers(0, len(own) - 1)))]
    weights = token_mean([*own, *copies])
    assert [w.dtype for w in weights] == [np.float32] * len(weights)
    assert [len(w) for w in weights] == [len(t.tokens) for t in (*own, *copies)]
    total = sum(float(w.sum(dtype=np.float64)) for w in weights)
    assert total == (pytest.approx(1.0, abs=1e-6) if sum(counts) else 0.0)


@steady
@given(sampled_counts, st.data())
def test_a_copy_shares_the_weight_of_its_original(counts: list[int], data: st.DataObject) -> None:
    own = members(counts)
    which = data.draw(st.integers(0, len(own) - 1))
    times = data.draw(st.integers(1, 3))
    alone = token_mean(own)
    padded = token_mean([*own, *[copy_of(own[which])] * times])
    for index, weight in enumerate(alone):
        together = padded[index] * np.float32(1 + times if index == which else 1)
        np.testing.assert_allclose(together, weight, rtol=1e-6)
    for copied in padded[len(own) :]:
        np.testing.assert_array_equal(copied, padded[which])


def test_shares_count_rollouts_not_trajectories() -> None:
    a, b = members([1, 1])
    assert shares([a, b, copy_of(b), copy_of(b)]) == [1.0, 1 / 3, 1 / 3, 1 / 3]


def test_the_same_sample_of_another_prompt_is_another_rollout() -> None:
    assert shares([trajectory(0, prompt=0), trajectory(0, prompt=1)]) == [1.0, 1.0]


def test_nothing_sampled_weighs_nothing() -> None:
    empty = [trajectory(versions=()), trajectory(1, versions=(NOT_SAMPLED,))]
    assert [w.tolist() for w in token_mean(empty)] == [[0.0], [0.0, 0.0]]
    assert token_mean([]) == []
