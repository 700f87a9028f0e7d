"""Double-sided importance sampling by hand, on both sides of its band."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import Array
from rl_jax.losses.recipes import dis, supervised
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, Scores
from rl_jax.metrics import names
from tests.losses.terms import applied, numbers, reported, scores, uniform
from tests.trajectories.build import trajectory

LOSS = dis(eps_low=0.3, eps_high=5.0)
BELOW, INSIDE, ABOVE = 0.5, (0.75, 1.0, 5.5), 7.0
PROBABILITIES = np.array([0.2, 0.3, 0.5])
ACTION = 1


def value(loss: Loss, given: Scores) -> Array:
    return jnp.sum(uniform(given) * applied(loss.transform, given)[0].loss)


def gradient(loss: Loss, given: Scores) -> np.ndarray:
    """With respect to the current log-probabilities of the row."""
    return np.asarray(jax.grad(lambda c: value(loss, given._replace(current=c)))(given.current))[0]


def behavior_for(ratios: list[float], current: float) -> np.ndarray:
    return np.float32(current - np.log(ratios))


@pytest.mark.parametrize("advantage", [1.5, -2.0])
def test_gradient_of_every_side_of_the_band(advantage: float) -> None:
    ratios = [BELOW, *INSIDE, ABOVE]
    given = scores([math.log(0.3)] * 5, behavior_for(ratios, math.log(0.3)), advantage)
    # -f(d) A / 5: five sampled tokens in the denominator, whatever the band does to them.
    want = [0.0, *(-d * advantage / 5 for d in INSIDE), 0.0]
    np.testing.assert_allclose(gradient(LOSS, given), want, rtol=1e-6)
    terms, _ = applied(LOSS.transform, given)
    np.testing.assert_allclose(terms.weight[0], [0.0, *INSIDE, 0.0], rtol=1e-6)
    assert terms.kept.tolist() == [[False, True, True, True, False]]
    said = reported(LOSS.transform, given)
    assert said["two_sided_mask/below"] == said["two_sided_mask/above"] == pytest.approx(0.2)
    assert said["two_sided_mask/dropped"] == pytest.approx(0.4)
    assert said[names.MASKED_SHARE] == pytest.approx(0.4)
    assert said[names.RATIO_MEAN] == pytest.approx(sum(ratios) / 5)


@pytest.mark.parametrize("advantage", [1.5, -2.0])
def test_gradient_with_respect_to_logits(advantage: float) -> None:
    ratios = [BELOW, *INSIDE, ABOVE]
    given = scores([0.0] * 5, behavior_for(ratios, math.log(PROBABILITIES[ACTION])), advantage)

    def of_logits(logits: Array) -> Array:
        current = jax.nn.log_softmax(logits)[:, ACTION]
        return value(LOSS, given._replace(current=current[None]))

    got = jax.grad(of_logits)(jnp.log(jnp.tile(PROBABILITIES, (5, 1))))
    chosen = np.eye(3)[ACTION] - PROBABILITIES  # d log p(action) / d logits
    want = [-f * advantage / 5 * chosen for f in (0.0, *INSIDE, 0.0)]
    np.testing.assert_allclose(got, want, atol=1e-7)


@pytest.mark.parametrize("edge", [math.log1p(-0.3), math.log1p(5.0)])
def test_the_band_is_open(edge: float) -> None:
    exactly = np.float32(edge)
    inward = np.nextafter(exactly, np.float32(0))
    got = gradient(LOSS, scores([0.0, 0.0], [-exactly, -inward]))
    assert got[0] == 0.0
    assert got[1] == pytest.approx(-math.exp(edge) / 2, rel=1e-5)


def test_each_side_has_its_own_edge() -> None:
    ratios = [0.85, 1.3]
    given = scores([0.0, 0.0], behavior_for(ratios, 0.0))
    assert (gradient(dis(0.1, 0.4), given) != 0).tolist() == [False, True]
    assert (gradient(dis(0.4, 0.1), given) != 0).tolist() == [True, False]


def test_tokens_that_were_not_sampled_have_no_gradient() -> None:
    given = scores([-1.0, -1.0], [-1.0, -1.0], advantages=3.0, mask=[False, True])
    np.testing.assert_allclose(gradient(LOSS, given), [0.0, -3.0])
    said = numbers(applied(LOSS.transform, given)[1])
    assert said["policy/neg_logprob"] == 1.0


def test_masked_tokens_stay_in_the_denominator() -> None:
    # The reduction sees trajectories, not ratios: three sampled tokens, one of them out of band.
    weights = token_mean([trajectory(versions=(0, 0, 0))])[0]
    given = scores([0.0] * 4, behavior_for([1.0, 9.0, 1.0, 1.0], 0.0), mask=weights > 0)

    def total(current: Array) -> Array:
        return jnp.sum(weights * applied(LOSS.transform, given._replace(current=current))[0].loss)

    np.testing.assert_allclose(
        jax.grad(total)(given.current)[0], [0.0, 0.0, -1 / 3, -1 / 3], rtol=1e-6
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    ("current", "behavior"),
    [(-1.0, -math.inf), (-math.inf, -1.0), (0.0, -1e4), (-1e4, 0.0), (0.0, -3e38), (-3e38, 0.0)],
)
def test_infinite_and_huge_ratios_stay_finite(
    current: float, behavior: float, advantage: float
) -> None:
    given = scores([current, -1.0], [behavior, -1.0], advantage)
    assert value(LOSS, given) == pytest.approx(advantage / 2)
    np.testing.assert_allclose(gradient(LOSS, given), [0.0, -advantage / 2])


def test_what_is_not_a_number_is_not_hidden() -> None:
    assert math.isnan(value(LOSS, scores([-1.0, -1.0], [math.nan, -1.0])))


def test_all_tokens_out_of_band_give_no_gradient() -> None:
    given = scores([-1.0, -1.0, -1.0], behavior_for([0.1, 0.6999, 6.001], -1.0), 2.0)
    assert gradient(LOSS, given).tolist() == [0.0, 0.0, 0.0]
    assert float(value(LOSS, given)) == 0.0


@pytest.mark.parametrize("eps_low", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_eps_low_out_of_range(eps_low: float) -> None:
    with pytest.raises(ValueError, match=r"eps_low must lie in \(0, 1\)"):
        dis(eps_low=eps_low)


@pytest.mark.parametrize("eps_high", [0.0, -1.0, math.nan])
def test_eps_high_out_of_range(eps_high: float) -> None:
    with pytest.raises(ValueError, match="eps_high must be positive"):
        dis(eps_high=eps_high)


def test_supervised_is_the_mean_negative_log_probability() -> None:
    given = scores([-1.0, -2.0, -9.0], 0.0, mask=[True, True, False])
    assert float(value(supervised(), given)) == 1.5
    np.testing.assert_allclose(gradient(supervised(), given), [-0.5, -0.5, 0.0])
    assert numbers(applied(supervised().transform, given)[1]) == {"ce/nats": 1.5}
