"""Masks by hand: which tokens lose their surrogate, and that the shares add up."""

import math

import numpy as np
import pytest

from rl_jax.losses.combine import chain
from rl_jax.losses.masks import (
    band_mask,
    divergence_mask,
    estimator_mask,
    mask_stale,
    masked_above,
    sequence_kl_mask,
    two_sided_mask,
    veto,
)
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.recipes import dapo
from rl_jax.losses.types import LossTransform, Scores
from rl_jax.metrics import names
from tests.losses.terms import applied, numbers, reported, scores


def kept(mask: LossTransform, given: Scores) -> list[bool]:
    return applied(chain(current_over_behavior(), mask), given)[0].kept[0].tolist()


def of_ratios(ratios: list[float], advantages: object = 1.0, **others: object) -> Scores:
    return scores([0.0] * len(ratios), -np.log(ratios), advantages, **others)


@pytest.mark.parametrize("edge", [math.log(0.5), math.log(5.0)])
def test_the_band_is_closed(edge: float) -> None:
    exactly = np.float32(edge)
    outward = np.nextafter(exactly, np.float32(math.copysign(9, edge)))
    given = scores([0.0, 0.0], [-exactly, -outward])
    assert kept(band_mask(0.5, 5.0), given) == [True, False]


def test_the_band_may_be_open_on_a_side() -> None:
    given = of_ratios([1e-3, 1.0, 6.0])
    assert kept(band_mask(None, 5.0), given) == [True, True, False]
    assert kept(band_mask(0.5, None), given) == [False, True, True]
    said = reported(chain(current_over_behavior(), band_mask(0.5, None)), given)
    assert said["band_mask/below"] == said["band_mask/dropped"] == pytest.approx(1 / 3)
    assert said["band_mask/above"] == 0.0


def test_one_hopeless_token_drops_its_trajectory() -> None:
    ratios, segments = [1.0, 5e-5, 2.0, 1.0, 2e-4], [0, 0, 0, 1, 1]
    given = of_ratios(ratios, segments=segments)
    assert kept(veto(1e-4), given) == [False, False, False, True, True]
    assert kept(veto(1e-3), given) == [False] * 5
    unsampled = of_ratios(ratios, segments=segments, mask=[True, False, True, True, True])
    assert kept(veto(1e-4), unsampled) == [True, False, True, True, True]


@pytest.mark.parametrize("threshold", [2e-9, 0.0, 1.0, math.nan])
def test_a_veto_below_the_cut_of_ratios_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"veto: threshold must lie in \(2.1e-09, 1\), got"):
        veto(threshold)


# Probabilities of the current and the sampling policy: up by 0.3, down by 0.3, up by 0.1.
NOW, THEN = np.array([0.6, 0.2, 0.5]), np.array([0.3, 0.5, 0.4])


@pytest.mark.parametrize(
    ("advantage", "sign_aware", "want"),
    [
        (1.0, True, [False, True, True]),
        (-1.0, True, [True, False, True]),
        (0.0, True, [True, True, True]),
        (1.0, False, [False, False, True]),
        (-1.0, False, [False, False, True]),
    ],
)
@pytest.mark.parametrize(("kind", "delta"), [("tv", 0.2), ("kl", 0.1)])
def test_divergence(
    kind: str, delta: float, advantage: float, sign_aware: bool, want: list[bool]
) -> None:
    # Binary KLs: 0.184, 0.223 and 0.020 nats.
    given = scores(np.log(NOW), np.log(THEN), advantage)
    assert kept(divergence_mask(delta, kind, sign_aware), given) == want


def test_binary_kl_in_nats() -> None:
    nats = THEN * np.log(THEN / NOW) + (1 - THEN) * np.log((1 - THEN) / (1 - NOW))
    given = scores(np.log(NOW), np.log(THEN))
    for token, value in enumerate(nats):
        for factor, want in ((0.999, False), (1.001, True)):
            mask = divergence_mask(value * factor, "kl", sign_aware=False)
            assert kept(mask, given)[token] is want


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_divergence_of_sure_and_impossible_tokens(kind: str) -> None:
    given = scores([0.0, -1e4, 0.0, -1e4], [-1e4, 0.0, 0.0, -1e4])
    mask = divergence_mask(0.2, kind, sign_aware=False)
    # KL(0 || 1) is infinite, and so is KL(1 || 0); equal policies do not diverge.
    assert kept(mask, given) == [False, False, True, True]


def test_estimators_against_their_formulas() -> None:
    log_ratios = np.array([-1.0, 0.5, 0.1])
    given = scores(log_ratios, 0.0, segments=[0, 0, 1])
    values = {
        "k1": -log_ratios,
        "k2": log_ratios**2 / 2,
        "k3": np.exp(log_ratios) - 1 - log_ratios,
    }
    for estimator, each in values.items():
        first, second, third = each
        for level, want in {
            "token": [first, second, third],
            "geometric": [(first + second) / 2] * 2 + [third],
            "sequence": [first + second] * 2 + [third],
        }.items():
            smallest, largest = min(want), max(want)
            by = 1e-3
            sides = (None, smallest + by), (largest - by, None), (smallest - by, smallest + by)
            for low, high in sides:
                mask = estimator_mask(estimator, low, high, level)
                floor, ceiling = -9.0 if low is None else low, 9.0 if high is None else high
                inside = [floor <= value <= ceiling for value in want]
                assert kept(mask, given) == inside, (estimator, level, low, high)


def test_sequences_the_policy_left_are_dropped_where_they_lost() -> None:
    # Mean log(old / current): 0.1, then -0.1, then 0.1 again.
    given = scores(
        [-0.3, 0.1, -0.1, 0.3, -0.1],
        0.0,
        [-1.0, -1.0, -1.0, -1.0, 1.0],
        segments=[0, 0, 1, 1, 2],
    )
    assert kept(sequence_kl_mask(0.05), given) == [False, False, True, True, True]
    assert kept(sequence_kl_mask(0.2), given) == [True] * 5


def test_dropped_and_kept_add_up() -> None:
    ratios = [1.0, 0.1, 9.0, 1e-5, 1.0, 3.0, 1.0]
    given = of_ratios(ratios, -1.0, segments=[0, 0, 0, 1, 1, 2, 2], lag=[0, 9, 0, 9, 0, 0, 9])
    given = given._replace(mask=given.mask.at[0, -1].set(False))
    masks = chain(
        mask_stale(4),
        current_over_behavior(),
        veto(),
        two_sided_mask(0.5, 5.0),
        band_mask(0.5, 2.0),
        policy_gradient(),
    )
    said = reported(masks, given)
    parts = {name: value for name, value in said.items() if name.endswith("/dropped")}
    # Stale: 0.1 and 1e-5. Veto: 1e-5 is dropped already, its neighbour not. Then 9.0, then 3.0.
    assert parts == pytest.approx(
        {
            "mask_stale/dropped": 2 / 6,
            "veto/dropped": 1 / 6,
            "two_sided_mask/dropped": 1 / 6,
            "band_mask/dropped": 1 / 6,
        }
    )
    assert said[names.MASKED_SHARE] == pytest.approx(sum(parts.values()))


def test_masked_above_keeps_the_reduction() -> None:
    loss = dapo()
    masked = masked_above(loss, 1)
    assert masked.reduction is loss.reduction
    given = scores([-1.0, -1.0], -1.0, lag=[1, 2], proximal=-1.0)
    assert applied(masked.transform, given)[0].loss.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: band_mask(None, None), "band_mask: needs low, high or both"),
        (lambda: band_mask(1.0, 1.0), "band_mask: low must be below high"),
        (lambda: band_mask(0.0, 1.0), "band_mask: low must be positive"),
        (lambda: divergence_mask(0.0), "divergence_mask: delta must be positive"),
        (lambda: estimator_mask("k1", None, None), "estimator_mask: needs low, high or both"),
        (lambda: sequence_kl_mask(-1.0, name="mine"), "mine: delta must be positive"),
    ],
)
def test_masks_that_make_no_sense(make: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()  # type: ignore[operator]


def test_the_name_is_the_metrics_prefix() -> None:
    two = chain(current_over_behavior(), band_mask(0.5, 2.0), band_mask(0.1, 9.0, name="wide"))
    said = numbers(applied(two, of_ratios([1.0, 4.0]))[1])
    assert (said["band_mask/dropped"], said["wide/dropped"]) == (0.5, 0.0)
