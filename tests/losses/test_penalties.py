"""Penalties by hand, and that they hold where a mask dropped the surrogate."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import Array
from rl_jax.losses.combine import chain
from rl_jax.losses.distillation import teacher_advantage
from rl_jax.losses.masks import band_mask
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.penalties import adaptive_kl, entropy_bonus, kl, squared_log_ratio
from rl_jax.losses.ratios import current_over_behavior
from tests.losses.terms import applied, gradient, numbers, scores

X = np.array([0.5, -1.0])  # log reference - log current
GIVEN = scores(
    [-1.0, -2.0, 0.0], [-1.3, -1.0, 0.0], mask=[True, True, False], reference=[-0.5, -3.0, 9.0]
)
IMPORTANCE = np.exp([0.3, -1.0])


@pytest.mark.parametrize(
    ("estimator", "nats", "slope"),
    [
        ("k1", -X, [1.0, 1.0]),
        ("k2", X**2 / 2, -X),
        ("k3", np.exp(X) - 1 - X, 1 - np.exp(X)),
    ],
)
def test_kl(estimator: str, nats: np.ndarray, slope: np.ndarray) -> None:
    terms, metrics = applied(kl(estimator=estimator, coefficient=0.1), GIVEN)
    np.testing.assert_allclose(terms.loss[0], [*(0.1 * nats), 0.0], rtol=1e-5)
    np.testing.assert_allclose(
        gradient(kl(estimator=estimator, coefficient=0.1), GIVEN),
        [*(0.1 * np.array(slope)), 0],
        rtol=1e-5,
    )
    assert numbers(metrics) == {"kl/nats": pytest.approx(nats.mean(), rel=1e-5)}
    unbiased = kl(estimator=estimator, coefficient=0.1, importance=True)
    np.testing.assert_allclose(
        applied(unbiased, GIVEN)[0].loss[0], [*(0.1 * IMPORTANCE * nats), 0.0], rtol=1e-5
    )
    np.testing.assert_allclose(
        gradient(unbiased, GIVEN), [*(0.1 * IMPORTANCE * (nats + slope)), 0.0], rtol=1e-5
    )


def test_with_importance_the_expected_gradient_is_that_of_the_divergence() -> None:
    """Summed over three actions under the policy that sampled, against KL(current || reference)."""
    logits, reference = jnp.array([0.3, -0.2, 0.6]), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    behavior = jnp.log(jnp.array([0.5, 0.25, 0.25]))

    def divergence(logits: Array) -> Array:
        current = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(current) * (current - reference))

    def expected(logits: Array, estimator: str) -> Array:
        given = scores([0.0] * 3, behavior, reference=reference)
        given = given._replace(current=jax.nn.log_softmax(logits)[None])
        term = kl(estimator=estimator, coefficient=1.0, importance=True)
        return jnp.sum(jnp.exp(behavior) * applied(term, given)[0].loss[0])

    for estimator in ("k1", "k3"):
        got = jax.value_and_grad(expected)(logits, estimator)
        for a, b in zip(got, jax.value_and_grad(divergence)(logits), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_penalties_hold_where_the_surrogate_was_dropped() -> None:
    given = scores([0.0, 0.0], [-3.0, 0.0], reference=[-1.0, 0.0], entropy=2.0)
    masked = current_over_behavior(), band_mask(0.5, 2.0), policy_gradient()
    parts = kl(coefficient=0.1), entropy_bonus(0.01), squared_log_ratio(0.5)
    terms, metrics = applied(chain(*masked, *parts), given)
    assert terms.kept.tolist() == [[False, True]]
    first = 0.1 * math.exp(-1) + -0.02 + 0.5 * 9
    np.testing.assert_allclose(terms.loss[0], [first, -0.02], rtol=1e-5)
    assert numbers(metrics)["entropy_bonus/nats"] == 2.0
    assert numbers(metrics)["squared_log_ratio/squared"] == 4.5
    # The weight is the surrogate's alone.
    assert terms.weight.tolist() == [[0.0, 1.0]]


def test_squared_log_ratio_pulls_both_ways() -> None:
    given = scores([0.5, -1.5], [0.0, 0.0])
    pull = gradient(chain(current_over_behavior(), squared_log_ratio(0.1)), given)
    np.testing.assert_allclose(pull, [0.1, -0.3], rtol=1e-6)


def test_entropy_carries_its_gradient() -> None:
    given = scores([0.0, 0.0], 0.0, mask=[True, False], entropy=[1.5, math.nan])

    def total(entropy: Array) -> Array:
        others = {"entropy": entropy}
        return applied(entropy_bonus(0.2), given._replace(others=others))[0].loss.sum()

    value, slope = jax.value_and_grad(total)(given.others["entropy"])
    assert float(value) == pytest.approx(-0.3)
    np.testing.assert_allclose(slope, [[-0.2, 0.0]])


def test_the_coefficient_follows_the_divergence() -> None:
    penalty = adaptive_kl(0.1, horizon=100.0, initial=0.5, estimator="k1")
    assert penalty.stats is not None and penalty.needs == {"reference"}
    state, stats = penalty.init(), penalty.stats(GIVEN)
    assert [float(x) for x in stats] == pytest.approx([0.5, 2.0])
    terms, metrics = penalty.apply(GIVEN, applied(penalty, GIVEN)[0], stats, state)
    assert numbers(metrics)["adaptive_kl/coefficient"] == 0.5
    np.testing.assert_allclose(terms.loss[0], 2 * 0.5 * np.array([-0.5, 1.0, 0.0]), rtol=1e-6)
    # 0.25 nats are 1.5 above the target of 0.1: the step is cut to 0.2 x 2 tokens / 100.
    assert float(penalty.advance(state, stats)) == pytest.approx(0.5 * (1 + 0.2 * 2 / 100))
    half = penalty.advance(state, (jnp.float32(0.18), jnp.float32(2.0)))
    assert float(half) == pytest.approx(0.5 * (1 - 0.1 * 2 / 100))
    low = penalty.advance(state, (jnp.float32(0.0), jnp.float32(2.0)))
    assert float(low) == pytest.approx(0.5 * (1 - 0.2 * 2 / 100))
    # A batch beyond the horizon moves it no further than one of its size.
    many = penalty.advance(state, (jnp.float32(0.0), jnp.float32(1e4)))
    assert float(many) == pytest.approx(0.5 * (1 - 0.2))


def test_a_teacher_gives_the_advantages() -> None:
    given = scores(
        [-1.0, -1.0, -1.0, 0.0], 0.0, 9.0, [True] * 3 + [False], teacher_big=[-0.5, -4.0, -1e4, 0]
    )
    both = chain(teacher_advantage("big", bound=2.0), policy_gradient())
    assert both.needs == {"teacher(big)"}
    terms, metrics = applied(both, given)
    assert terms.advantages.tolist() == [[0.5, -2.0, -2.0, 0.0]]
    assert gradient(both, given).tolist() == [-0.5, 2.0, 2.0, 0.0]
    said = numbers(metrics)
    assert said["teacher_advantage/mean"] == pytest.approx(-3.5 / 3)
    assert said["teacher_advantage/bounded"] == pytest.approx(2 / 3)
    free = applied(teacher_advantage("big"), given)[0].advantages
    assert free.tolist() == [[0.5, -3.0, -20.0, 0.0]]


def test_a_teacher_as_a_term() -> None:
    given = scores([-1.0], 0.0, teacher_big=[-0.5])
    term = kl("teacher(big)", "k2", coefficient=2.0, name="distil")
    terms, metrics = applied(term, given)
    assert terms.loss.tolist() == [[0.25]]
    assert numbers(metrics) == {"distil/nats": 0.125}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: kl(coefficient=0.0), "kl: coefficient must be positive and finite, got 0.0"),
        (lambda: kl("old", coefficient=1.0), "kl: there is no score 'old'"),
        (lambda: adaptive_kl(0.1, 0.0, 1.0), "adaptive_kl: horizon must be positive"),
        (lambda: entropy_bonus(-1.0), "entropy_bonus: coefficient must be positive"),
        (lambda: squared_log_ratio(math.nan), "squared_log_ratio: coefficient must be positive"),
        (lambda: teacher_advantage("big", 0.0), "teacher_advantage: bound must be positive"),
        (lambda: teacher_advantage("a b"), "teacher: needs a name of letters"),
    ],
)
def test_penalties_that_make_no_sense(make: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()  # type: ignore[operator]
