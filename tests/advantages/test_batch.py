"""Advantages that look at the whole batch."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings

from rl_jax.advantages import (
    VALUES,
    batch_standardised,
    gae,
    group_mean,
    reinforce_plus_plus,
    single,
)
from rl_jax.trajectories.types import NOT_SAMPLED, Group
from tests.advantages.build import BATCHES, Known, computed, known, last, members
from tests.trajectories.build import group, steady, trajectory

few = settings(steady, max_examples=50)


def test_batch_standardised_by_hand() -> None:
    # advantages 1/2, -1/2, 0, 0: their variance over the four rollouts is 1/8
    got = last(batch_standardised(), group(0, rewards=(1.0, 0.0)), group(1, rewards=(1.0, 1.0)))
    root = 2**0.5
    np.testing.assert_allclose(got, [[root, -root], [0, 0]], rtol=1e-5)


def test_epsilon_is_added_to_the_deviation() -> None:
    assert last(batch_standardised(epsilon=0.5), group(rewards=(1.0, 0.0))) == [[0.5, -0.5]]


def test_a_rollout_counts_once_however_long_and_in_however_many_parts() -> None:
    """Equal rollouts have this deviation; long and fanned-out ones must have it too."""
    lengths = {0: [1], 1: [3, 1, 2], 2: [7]}
    own = Group(
        "lookup",
        0,
        tuple(trajectory(s, float(s == 1), (0,) * n) for s, ns in lengths.items() for n in ns),
    )
    # 2/3, -1/3, -1/3: variance 2/9
    want = np.array([-1, 2, 2, 2, -1]) / 3 / (2 / 9) ** 0.5
    np.testing.assert_allclose(last(batch_standardised(), own), [want], rtol=1e-5)


@few
@given(BATCHES)
def test_batch_standardised_divides_by_one_number(batch: list) -> None:
    own = members(batch)
    plain, scaled = computed(gae(0.9, 0.8), own), computed(batch_standardised(gae(0.9, 0.8)), own)
    rollouts: dict[tuple[int, int], list[float]] = {}
    for k, (advantages, _) in zip(chain(*own), chain(*plain), strict=True):
        if k.trajectory.valid and k.trajectory.loss_mask.any():
            tokens = advantages[k.trajectory.loss_mask].tolist()
            rollouts.setdefault(k.trajectory.key[1:3], []).extend(tokens)
    mean = np.mean([np.mean(tokens) for tokens in rollouts.values()] or [0.0])
    squares = [np.mean((np.array(tokens) - mean) ** 2) for tokens in rollouts.values()]
    std = np.sqrt(np.mean(squares or [0.0]))
    differ = len({token for tokens in rollouts.values() for token in tokens}) > 1
    for (before, returns), (after, same) in zip(chain(*plain), chain(*scaled), strict=True):
        want = before if differ else np.zeros_like(before)
        np.testing.assert_allclose(after * (std + 1e-6), want, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(same, returns)


def test_it_keeps_what_its_advantage_needs_and_returns() -> None:
    inner = gae()
    assert batch_standardised(inner).needs == {VALUES}
    assert batch_standardised(inner).returns is inner.returns
    assert batch_standardised().returns is None


def test_it_comes_after_what_its_advantage_does_over_the_batch() -> None:
    own = group(rewards=(3.0, 1.0))
    # Whitened to 1 and -1, whose deviation is 1.
    got = last(batch_standardised(reinforce_plus_plus(), epsilon=1.0), own)
    np.testing.assert_allclose(got, [[0.5, -0.5]], rtol=1e-6)


def test_reinforce_plus_plus_by_hand() -> None:
    own = Group("lookup", 0, (trajectory(0, 4.0, (0, NOT_SAMPLED, 0)), trajectory(1, 0.0, (0,))))
    # Token returns 2 and 4, 0: mean 2, variance 8/3
    [[(first, _), (second, _)]] = computed(reinforce_plus_plus(gamma=0.5), [_known(own)])
    root = 2 / (8 / 3) ** 0.5
    np.testing.assert_allclose(first, [0, 0, 0, root], atol=1e-6)
    np.testing.assert_allclose(second, [0, -root], rtol=1e-6)


@few
@given(BATCHES)
def test_whitened_tokens_have_mean_0_and_deviation_1(batch: list) -> None:
    own = members(batch)
    pairs = list(zip(chain(*own), chain(*computed(reinforce_plus_plus(0.9), own)), strict=True))
    tokens = np.concatenate(
        [a[k.trajectory.loss_mask] for k, (a, _) in pairs if k.trajectory.valid] or [np.zeros(0)],
        dtype=np.float64,
    )
    if tokens.any():
        assert tokens.mean() == pytest.approx(0.0, abs=1e-5)
        assert tokens.std() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30])
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    batch = (group(0, rewards=(reward,) * 3), group(1, rewards=(reward,) * 4))
    for advantage in (
        reinforce_plus_plus(),
        batch_standardised(),
        batch_standardised(group_mean()),
    ):
        assert last(advantage, *batch) == [[0.0] * 3, [0.0] * 4]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e30])
def test_rollouts_all_alike_are_not_blown_up(reward: float) -> None:
    """Nothing is centred here, and the weights of lengths 3, 7 and 11 are no round numbers."""
    alike = [trajectory(i, reward, (0,) * n) for i, n in enumerate((3, 7, 11))]
    got = last(batch_standardised(single()), Group("lookup", 0, tuple(alike)))
    assert got == [[0.0] * 3]


def test_nothing_sampled_gives_zeros() -> None:
    empty = Group("lookup", 0, (trajectory(0, 1.0, ()), trajectory(1, 0.0, (NOT_SAMPLED,))))
    for advantage in (reinforce_plus_plus(), batch_standardised(), batch_standardised(single())):
        assert last(advantage, empty) == [[0.0, 0.0]]
        assert last(advantage) == []


@pytest.mark.parametrize("keywords", [{"gamma": 1.5}, {"epsilon": 0.0}])
def test_bad_keywords_are_named(keywords: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"reinforce_plus_plus: {next(iter(keywords))} must"):
        reinforce_plus_plus(**keywords)


def _known(own: Group) -> list[Known]:
    return [known(m, i) for i, m in enumerate(own.members)]
