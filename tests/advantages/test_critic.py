"""Advantages with a critic: by hand, and against the definitions written out as double sums."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.advantages import (
    LOG_RATIOS,
    VALUES,
    Advantage,
    Estimates,
    gae,
    length_adaptive_gae,
    vtrace,
)
from rl_jax.trajectories.types import NOT_SAMPLED
from tests.advantages.build import Known, computed
from tests.trajectories.build import steady, trajectory

SHARES = st.sampled_from([0.0, 0.3, 0.95, 1.0])
REALS = st.floats(-2, 2, width=32)
few = settings(steady, max_examples=50)


def one(advantage: Advantage, own: Known) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns on the sampled tokens of a rollout by itself, in float64."""
    [[(advantages, returns)]] = computed(advantage, [[own]])
    mask = own.trajectory.loss_mask
    return advantages[mask].astype(np.float64), returns[mask].astype(np.float64)


def rollout(
    reward: float, values: list[float], log_ratios: list[float] | None = None, every: int = 1
) -> Known:
    """A rollout whose sampled tokens have these estimates, `every` - 1 tool tokens before each."""
    versions = tuple(v for _ in values for v in (*[NOT_SAMPLED] * (every - 1), 0))
    member = trajectory(0, reward, versions)
    arrays = np.full((2, len(member.tokens)), 99.0, np.float32)
    arrays[0, member.loss_mask] = values
    arrays[1, member.loss_mask] = log_ratios or [0.0] * len(values)
    return Known(member, arrays[0], arrays[1])


def ratios_to_the_behavior(own: Known) -> np.ndarray:
    return np.exp(own.log_ratios[own.trajectory.loss_mask].astype(np.float64))


def definition(own: Known, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}."""
    v = own.values[own.trajectory.loss_mask].astype(np.float64).tolist()
    n = len(v)
    reward = own.trajectory.reward
    assert reward is not None
    deltas = [(reward if t == n - 1 else gamma * v[t + 1]) - v[t] for t in range(n)]
    return np.array(
        [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]
    )


def test_gae_by_hand() -> None:
    # delta_0 = 0.9 x 0.25 - 0.5 = -0.275, delta_1 = 1 - 0.25 = 0.75; 0.45 x 0.75 = 0.3375
    advantages, returns = one(gae(0.9, 0.5), rollout(1.0, [0.5, 0.25], every=3))
    np.testing.assert_allclose(advantages, [0.0625, 0.75], rtol=1e-6)
    np.testing.assert_allclose(returns, [0.9, 1.0], rtol=1e-6)


@few
@given(st.lists(REALS, min_size=1, max_size=9), REALS, SHARES, SHARES, SHARES)
def test_gae_is_its_definition(
    values: list[float], reward: float, gamma: float, lam: float, returns_lam: float
) -> None:
    own = rollout(reward, values)
    advantages, returns = one(gae(gamma, lam, returns_lam), own)
    np.testing.assert_allclose(advantages, definition(own, gamma, lam), rtol=1e-5, atol=1e-5)
    want = own.values[own.trajectory.loss_mask] + definition(own, gamma, returns_lam)
    np.testing.assert_allclose(returns, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("advantage", [gae(0.9, 0.5), length_adaptive_gae(), vtrace(0.9, 2, 1.5)])
def test_tool_tokens_are_skipped(advantage: Advantage) -> None:
    """The last token of an action is followed by the first of the next."""
    values, log_ratios = [0.5, -0.25, 1.0, 0.75], [0.5, -1.0, 0.25, 2.0]
    plain = one(advantage, rollout(1.0, values, log_ratios))
    np.testing.assert_array_equal(one(advantage, rollout(1.0, values, log_ratios, every=4)), plain)


def test_the_reward_is_paid_at_the_last_sampled_token() -> None:
    member = trajectory(0, 1.0, (0, 0, NOT_SAMPLED, NOT_SAMPLED))
    zeros = np.zeros(len(member.tokens), np.float32)
    advantages, returns = one(gae(0.5, 0.0), Known(member, zeros, zeros))
    assert advantages.tolist() == [0.0, 1.0]
    assert returns.tolist() == [0.5, 1.0]


def test_each_trajectory_of_a_rollout_is_paid_at_its_own_end() -> None:
    own = [rollout(1.0, [0.5, 0.25]), rollout(1.0, [0.75])]
    [[(first, _), (second, _)]] = computed(gae(), [own])
    assert first.tolist() == [0.0, 0.5, 0.75]
    assert second.tolist() == [0.0, 0.25]


@pytest.mark.parametrize(
    ("alpha", "tokens", "lam"),
    [(1.5, 4, 1 - 1 / 6), (1.5, 1, 1 / 3), (0.05, 100, 0.8), (0.05, 20, 0.0), (0.05, 2, 0.0)],
)
def test_lam_follows_from_the_number_of_sampled_tokens(
    alpha: float, tokens: int, lam: float
) -> None:
    values = np.random.default_rng(0).normal(size=tokens).tolist()
    own = rollout(1.0, values, every=2)
    advantages, returns = one(length_adaptive_gae(alpha, 0.9, 0.95), own)
    np.testing.assert_allclose(advantages, definition(own, 0.9, lam), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(returns, one(gae(0.9, 1.0, 0.95), own)[1])


def test_vtrace_by_hand() -> None:
    # ratios 2 and 1/2; rho = 1.5, 1/2; c = 1, 1/2; deltas -0.25 and 0.75, all with gamma 1
    # v_1 = 0.25 + 0.5 x 0.75 = 0.625, v_0 = 0.5 - 0.375 + 1 x (0.625 - 0.25) = 0.5
    own = rollout(1.0, [0.5, 0.25], [math.log(2), -math.log(2)])
    advantages, returns = one(vtrace(rho_bar=1.5, c_bar=1.0), own)
    np.testing.assert_allclose(returns, [0.5, 0.625], rtol=1e-6)
    # v_1 - V_0 and r - V_1
    np.testing.assert_allclose(advantages, [0.125, 0.75], rtol=1e-6)


def written_out(own: Known, gamma: float, rho_bar: float, c_bar: float, lam: float) -> np.ndarray:
    """v_s = V_s + sum over t of gamma^(t-s) (prod of c_i, s <= i < t) rho_t delta_t: eq. 1."""
    v = own.values[own.trajectory.loss_mask].astype(np.float64)
    n = len(v)
    ratios = ratios_to_the_behavior(own)
    rho, c = np.minimum(rho_bar, ratios), lam * np.minimum(c_bar, ratios)
    reward = own.trajectory.reward
    assert reward is not None
    v_next = [*v[1:], 0.0]
    deltas = [
        rho[t] * ((reward if t == n - 1 else 0.0) + gamma * v_next[t] - v[t]) for t in range(n)
    ]
    return np.array(
        [
            v[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * deltas[t] for t in range(s, n))
            for s in range(n)
        ]
    )


@few
@given(
    st.lists(st.tuples(REALS, REALS), min_size=1, max_size=7),
    REALS,
    SHARES,
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.5, 1.0, 3.0]),
    SHARES,
)
def test_vtrace_is_its_explicit_and_its_recursive_form(
    tokens: list[tuple[float, float]],
    reward: float,
    gamma: float,
    rho_bar: float,
    c_bar: float,
    lam: float,
) -> None:
    own = rollout(reward, [v for v, _ in tokens], [x for _, x in tokens], every=2)
    advantages, returns = one(vtrace(gamma, rho_bar, c_bar, lam), own)
    want = written_out(own, gamma, rho_bar, c_bar, lam)
    np.testing.assert_allclose(returns, want, rtol=1e-5, atol=1e-5)
    v = own.values[own.trajectory.loss_mask].astype(np.float64)
    ratios = ratios_to_the_behavior(own)
    after, value_after = 0.0, 0.0
    for t in reversed(range(len(v))):
        paid = reward if t == len(v) - 1 else 0.0
        mixed = lam * after + (1 - lam) * value_after
        assert advantages[t] == pytest.approx(paid + gamma * mixed - v[t], rel=1e-5, abs=1e-5)
        delta = min(rho_bar, ratios[t]) * (paid + gamma * value_after - v[t])
        after = v[t] + delta + gamma * lam * min(c_bar, ratios[t]) * (after - value_after)
        value_after = v[t]
        assert returns[t] == pytest.approx(after, rel=1e-5, abs=1e-5)


@few
@given(st.lists(REALS, min_size=1, max_size=9), REALS, SHARES, SHARES)
def test_on_policy_vtrace_is_gae(
    values: list[float], reward: float, gamma: float, lam: float
) -> None:
    own = rollout(reward, values)
    got, want = one(vtrace(gamma, lam=lam), own), one(gae(gamma, lam, lam), own)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    advantages, returns = one(vtrace(gamma), own)
    monte_carlo = [reward * gamma ** (len(values) - 1 - t) for t in range(len(values))]
    np.testing.assert_allclose(returns, monte_carlo, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantages, np.array(monte_carlo) - values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_vtrace_is_finite_under_any_ratio(log_ratio: float) -> None:
    own = rollout(1.0, [0.5, 0.25, 0.125], [log_ratio] * 3)
    _, returns = one(vtrace(rho_bar=2.0, c_bar=1.0), own)
    # Capped: v_t - V_t = 2 delta_t + (v_{t+1} - V_{t+1}). Ratios of 0: the values themselves.
    want = [0.5 - 0.5 - 0.25 + 1.75, 0.25 - 0.25 + 1.75, 0.125 + 1.75]
    np.testing.assert_allclose(returns, want if log_ratio > 0 else [0.5, 0.25, 0.125], rtol=1e-6)


def test_what_they_need() -> None:
    assert {VALUES, LOG_RATIOS} == set(Estimates._fields)
    assert gae().needs == length_adaptive_gae().needs == {VALUES}
    assert vtrace().needs == {VALUES, LOG_RATIOS}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: gae(gamma=1.1), r"gae: gamma must lie in \[0, 1\], got 1.1"),
        (lambda: gae(lam=-0.1), "gae: lam must"),
        (lambda: gae(returns_lam=math.nan), "gae: returns_lam must"),
        (lambda: length_adaptive_gae(alpha=0.0), "length_adaptive_gae: alpha must be positive"),
        (lambda: length_adaptive_gae(gamma=2.0), "length_adaptive_gae: gamma"),
        (lambda: vtrace(rho_bar=0.0), "vtrace: rho_bar must be positive"),
        (lambda: vtrace(c_bar=math.inf), "vtrace: c_bar must be positive and finite, got inf"),
        (lambda: vtrace(lam=2.0), "vtrace: lam must"),
    ],
)
def test_bad_keywords_are_named(made, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made()
