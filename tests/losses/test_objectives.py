"""Surrogates by hand: value, gradient and weight, at both signs and on every side of a bound."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import Array
from rl_jax.losses.bounds import weigh
from rl_jax.losses.combine import chain, token_weights
from rl_jax.losses.masks import band_mask
from rl_jax.losses.objectives import (
    clipped,
    cross_entropy,
    geometric_mean,
    importance_sampled,
    policy_gradient,
    soft_gated,
    squared_sequence,
    value_loss,
)
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.types import LossTransform, Scores
from tests.losses.terms import applied, gradient, numbers, scores

FACTOR = 3.0


def after_ratio(objective: LossTransform) -> LossTransform:
    """With a factor of 3 on all tokens."""
    factor = token_weights(lambda own: jnp.full_like(own.current, FACTOR))
    return chain(current_over_behavior(), factor, objective)


def of_ratios(ratios: list[float], advantages: object) -> Scores:
    return scores([-1.0] * len(ratios), -1.0 - np.log(ratios), advantages)


def check(objective: LossTransform, given: Scores, loss: list[float], weight: list[float]) -> None:
    """Values by hand; the gradient is -weight x advantage."""
    terms, _ = applied(after_ratio(objective), given)
    np.testing.assert_allclose(terms.loss[0], np.multiply(loss, FACTOR), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(terms.weight[0], np.multiply(weight, FACTOR), rtol=1e-5, atol=1e-7)
    slope = gradient(after_ratio(objective), given)
    np.testing.assert_allclose(slope, -terms.weight[0] * given.advantages[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("advantage", [2.0, -0.5, 0.0])
def test_linear_surrogates(advantage: float) -> None:
    given = of_ratios([0.5, 1.0, 4.0], advantage)
    check(policy_gradient(), given, [advantage] * 3, [1.0] * 3)
    check(
        importance_sampled(),
        given,
        [-0.5 * advantage, -advantage, -4 * advantage],
        [0.5, 1.0, 4.0],
    )


# Ratios 0.5, 0.9, 1.1, 2 and 9 with eps 0.2 / 0.3.
@pytest.mark.parametrize(
    ("advantage", "dual", "surrogate", "weight"),
    [
        (2.0, None, [1.0, 1.8, 2.2, 2.6, 2.6], [0.5, 0.9, 1.1, 0.0, 0.0]),
        (-2.0, None, [-1.6, -1.8, -2.2, -4.0, -18.0], [0.0, 0.9, 1.1, 2.0, 9.0]),
        (2.0, 3.0, [1.0, 1.8, 2.2, 2.6, 2.6], [0.5, 0.9, 1.1, 0.0, 0.0]),
        (-2.0, 3.0, [-1.6, -1.8, -2.2, -4.0, -6.0], [0.0, 0.9, 1.1, 2.0, 0.0]),
    ],
)
def test_clipped(
    advantage: float, dual: float | None, surrogate: list[float], weight: list[float]
) -> None:
    given = of_ratios([0.5, 0.9, 1.1, 2.0, 9.0], advantage)
    objective = clipped(0.2, 0.3, dual)
    check(objective, given, [-x for x in surrogate], weight)
    said = numbers(applied(after_ratio(objective), given)[1])
    assert said["clipped/high"] == pytest.approx(0.4 if advantage > 0 else 0.0)
    assert said["clipped/low"] == pytest.approx(0.0 if advantage > 0 else 0.2)
    if dual:
        assert said["clipped/dual"] == pytest.approx(0.0 if advantage > 0 else 0.2)


def test_the_gradient_on_the_edge_of_a_clip_is_whole() -> None:
    """`minimum` of two equal arguments would halve it."""
    edge = np.float32(math.log1p(0.3))
    given = scores([0.0, 0.0], [-edge, -np.nextafter(edge, np.float32(9))], 1.0)
    np.testing.assert_allclose(
        gradient(chain(current_over_behavior(), clipped(0.2, 0.3)), given), [-1.3, 0.0], rtol=1e-6
    )


@pytest.mark.parametrize(("advantage", "t"), [(2.0, 1.0), (-2.0, 1.05)])
def test_soft_gate(advantage: float, t: float) -> None:
    ratios = np.array([0.5, 1.0, 3.0])
    share = 1 / (1 + np.exp(-t * (ratios - 1)))
    check(
        soft_gated(),
        of_ratios(list(ratios), advantage),
        list(-advantage * 4 / t * share),
        list(4 * share * (1 - share) * ratios),
    )


def test_soft_gate_is_the_ratio_at_one() -> None:
    terms, metrics = applied(after_ratio(soft_gated(2.0, 3.0)), of_ratios([1.0], 1.0))
    assert terms.weight.tolist() == [[FACTOR]]
    assert numbers(metrics)["soft_gated/gate"] == 1.0


def test_the_gate_is_told_of_kept_tokens() -> None:
    given = of_ratios([1.0, 9.0, 3.0], 1.0)
    gated = chain(current_over_behavior(), band_mask(None, 5.0), soft_gated())
    share = 1 / (1 + math.exp(-2.0))
    want = (1 + 4 * share * (1 - share)) / 2
    assert numbers(applied(gated, given)[1])["soft_gated/gate"] == pytest.approx(want)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_weight_of_a_geometric_mean_with_dropped_tokens(advantage: float) -> None:
    """Two of three tokens have a term, and each of the two moves both."""
    given = of_ratios([0.9, 1.1, 9.0], advantage)
    objective = chain(band_mask(None, 5.0), geometric_mean(0.4, 0.4))
    ratio = (0.9 * 1.1) ** (1 / 3)
    check(objective, given, [-advantage * ratio] * 2 + [0.0], [ratio * 2 / 3] * 2 + [0.0])


def test_the_name_is_what_errors_say() -> None:
    assert policy_gradient(name="mine").name == cross_entropy(name="mine").name == "mine"


@pytest.mark.parametrize(
    ("advantage", "bounded", "free"),
    [(2.0, [-1.0, 0.4], [True, False]), (-2.0, [-0.3, 1.0], [False, True])],
)
def test_geometric_mean(advantage: float, bounded: list[float], free: list[bool]) -> None:
    ratio = math.exp(sum(bounded) / 2)
    given = of_ratios([math.exp(-1.0), math.exp(1.0)], advantage)
    objective = geometric_mean(0.3, 0.4)
    terms, metrics = applied(after_ratio(objective), given)
    np.testing.assert_allclose(terms.loss[0], [-FACTOR * advantage * ratio] * 2, rtol=1e-6)
    # Two terms, each with half of the ratio's slope at either token.
    want = -FACTOR * advantage * ratio * np.array(free)
    np.testing.assert_allclose(gradient(after_ratio(objective), given), want, rtol=1e-5)
    np.testing.assert_allclose(terms.weight[0], FACTOR * ratio * np.array(free), rtol=1e-6)
    sides = numbers(metrics)
    assert (sides["geometric_mean/high"], sides["geometric_mean/low"]) == (
        (0.5, 0.0) if advantage > 0 else (0.0, 0.5)
    )


def test_a_dropped_token_adds_nothing_to_the_geometric_mean() -> None:
    both = chain(current_over_behavior(), band_mask(0.5, 2.0), geometric_mean(9.0, 9.0))
    given = of_ratios([1.5, 1e3], 1.0)
    np.testing.assert_allclose(applied(both, given)[0].loss[0], [-math.sqrt(1.5), 0.0], rtol=1e-6)
    slope = gradient(both, given)
    np.testing.assert_allclose(slope, [-math.sqrt(1.5) / 2, 0.0], rtol=1e-6)


def test_squared_sequence_is_that_of_k1_5() -> None:
    """Sequences of 2 and 1 tokens, S = 0.3 and -0.5, A = 1 and -2, tau = 0.5."""
    given = scores([-1.0, -2.0, -1.0], [-1.5, -1.8, -0.5], [1.0, 1.0, -2.0], segments=[0, 0, 1])
    objective = chain(current_over_behavior(), squared_sequence(0.5))
    terms, metrics = applied(objective, given)
    squares = (1 - 0.15) ** 2, (-2 + 0.25) ** 2
    np.testing.assert_allclose(terms.loss[0], [squares[0], squares[0], squares[1]], rtol=1e-6)
    said = numbers(metrics)["squared_sequence/residual_squared"]
    assert said == pytest.approx((2 * squares[0] + squares[1]) / 3)
    np.testing.assert_allclose(terms.weight[0], [2.0, 2.0, 1.0])

    def paper(current: Array) -> Array:
        apart = current - given.behavior[0]
        return ((1 - 0.5 * (apart[0] + apart[1])) ** 2 + (-2 - 0.5 * apart[2]) ** 2) / 2

    def ours(current: Array) -> Array:
        weights = jnp.array([1 / 4, 1 / 4, 1 / 2])
        return jnp.sum(weights * applied(objective, given._replace(current=current[None]))[0].loss)

    for function in (lambda f: f, jax.grad):
        got, want = function(ours)(given.current[0]), function(paper)(given.current[0])
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_value_loss() -> None:
    given = scores([-1.0] * 3, -1.0, mask=[True, True, False], returns=1.0, value=[0.5, 3.0, 9.0])
    terms, metrics = applied(value_loss(), given)
    assert terms.loss.tolist() == [[0.125, 2.0, 0.0]]
    assert numbers(metrics) == {
        "value_loss/returns": 1.0,
        "value_loss/returns_squared": 1.0,
        "value_loss/error": -0.75,
        "value_loss/error_squared": pytest.approx(4.25 / 2),
    }

    def total(value: Array) -> Array:
        return applied(value_loss(), given._replace(others={"value": value}))[0].loss.sum()

    assert jax.grad(total)(given.others["value"]).tolist() == [[-0.5, 2.0, 0.0]]


def test_cross_entropy_heeds_factor_and_mask() -> None:
    given = scores([-1.0, -2.0, -4.0], 0.0, mask=[True, True, False])
    terms, metrics = applied(after_ratio(cross_entropy()), given)
    assert terms.loss.tolist() == [[3.0, 6.0, 0.0]]
    assert gradient(after_ratio(cross_entropy()), given).tolist() == [-3.0, -3.0, 0.0]
    assert numbers(metrics)["ce/nats"] == 1.5


OBJECTIVES = (
    policy_gradient(),
    importance_sampled(),
    clipped(0.2, 0.2, 3.0),
    soft_gated(),
    geometric_mean(0.4, 0.4),
    squared_sequence(0.1),
    value_loss(),
    cross_entropy(),
)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
def test_what_is_dropped_or_not_sampled_reaches_nothing(objective: LossTransform) -> None:
    """The second token is dropped with a ratio beyond all bounds, the third holds nan."""
    bad, tokens = math.nan, chain(current_over_behavior(), band_mask(0.5, 2.0), weigh(), objective)
    given = scores(
        [-1.0, -1e4, bad],
        [-1.1, 0.0, bad],
        [1.0, 5.0, bad],
        mask=[True, True, False],
        returns=[1.0, 5.0, bad],
        value=[0.0, -1e4, bad],
    )
    clean = scores([-1.0, 0.0, 0.0], [-1.1, -9.0, 0.0], [1.0, 0.0, 0.0], mask=[True, True, False])
    clean = clean._replace(returns=clean.advantages, others={"value": jnp.zeros((1, 3))})
    np.testing.assert_array_equal(
        applied(tokens, given)[0].loss, applied(tokens, clean)[0].loss, objective.name
    )
    assert applied(tokens, given)[0].loss[0, 1:].tolist() == [0.0, 0.0]
    slope = gradient(tokens, given)
    np.testing.assert_array_equal(slope, gradient(tokens, clean))
    assert slope[1:].tolist() == [0.0, 0.0]
    assert applied(tokens, given)[0].weight[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: clipped(0.0, 0.2), r"clipped: eps_low must lie in \(0, 1\), got 0.0"),
        (lambda: clipped(0.2, -0.2), "clipped: eps_high must be positive and finite, got -0.2"),
        (lambda: clipped(0.2, 0.2, 1.0), "clipped: dual must be above 1 and finite, got 1.0"),
        (lambda: soft_gated(0.0), "soft_gated: temperature_positive must be positive"),
        (lambda: geometric_mean(0.4, 0.0), "geometric_mean: eps_high must be positive"),
        (lambda: squared_sequence(0.0), "squared_sequence: tau must be positive"),
    ],
)
def test_objectives_that_make_no_sense(make: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()  # type: ignore[operator]
