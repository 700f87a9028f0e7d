"""Extremes: huge ratios, nothing kept, nothing sampled; and what terms and metrics promise."""

from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import pytest

from rl_jax.losses.types import PROXIMAL
from rl_jax.metrics import names
from tests.losses.conformance.batches import (
    HOME,
    LOGPROBS,
    REGIMES,
    Tokens,
    changed,
    trajectories,
)
from tests.losses.conformance.cases import CASES
from tests.losses.conformance.oracle import answers
from tests.losses.conformance.programs import SHUT, Told, run


def numbers(told: Told) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(told._replace(terms={}))] + [
        np.asarray(field) for terms in told.terms.values() for field in terms
    ]


def _alternating(even: float, odd: float) -> Callable[[Tokens], np.ndarray]:
    return lambda own: np.where(np.arange(len(own["mask"])) % 2, odd, even)


LOW, HIGH = -1e4 - 0.1, -0.1
MIXED, OTHERWISE = _alternating(LOW, HIGH), _alternating(HIGH, LOW)
HUGE = {
    "d = e^-1e4": dict.fromkeys(("behavior", *LOGPROBS), HIGH) | {"current": LOW},
    "d = e^1e4": dict.fromkeys(("behavior", *LOGPROBS), LOW) | {"current": HIGH},
    "both": dict.fromkeys(("behavior", *LOGPROBS), OTHERWISE) | {"current": MIXED},
    "rho = e^1e4, r = e^-1e4": {"behavior": LOW, PROXIMAL: HIGH, "current": LOW},
    "rho = e^-1e4, r = e^1e4": {"behavior": HIGH, PROXIMAL: LOW, "current": HIGH},
}


@cache
def huge(ratios: str) -> dict[str, Told]:
    return run(changed(trajectories("middle"), **HUGE[ratios]), [HOME])


@cache
def shut() -> dict[str, Told]:
    return run(changed(trajectories("middle"), lag=SHUT), [HOME])


@cache
def not_sampled() -> dict[str, Told]:
    none = tuple(own | {"mask": np.zeros_like(own["mask"])} for own in trajectories("middle"))
    return run(none, [HOME])


@cache
def plain(regime: str) -> dict[str, Told]:
    return run(trajectories(regime), [HOME])


@cache
def unit(regime: str, sign: float) -> dict[str, Told]:
    return run(changed(trajectories(regime), advantages=sign), [HOME], weights=1.0)


@pytest.mark.parametrize("name", CASES)
def test_huge_ratios_give_finite_values_and_gradients(name: str) -> None:
    for ratios in HUGE:
        assert all(np.isfinite(leaf).all() for leaf in numbers(huge(ratios)[name])), ratios


@pytest.mark.parametrize("name", CASES)
def test_what_an_earlier_mask_dropped_has_no_surrogate(name: str) -> None:
    """Penalties stay, as they act on every sampled token."""
    told = shut()[name]
    want = answers(CASES[name].oracle, changed(trajectories("middle"), lag=SHUT), kept=False)
    for number, answer in enumerate(want):
        assert not told.terms[number].kept.any()
        assert not told.terms[number].weight.any()
        for score, gradients in told.gradients.items():
            np.testing.assert_allclose(
                gradients[number], answer.gradients[score], rtol=2e-5, atol=2e-6
            )
    if CASES[name].linear:
        assert told.loss == 0.0
        assert not any(g.any() for by in told.gradients.values() for g in by.values())


@pytest.mark.parametrize("name", CASES)
def test_a_microbatch_without_a_sampled_token_adds_nothing(name: str) -> None:
    told = not_sampled()[name]
    assert told.loss == 0.0
    assert not any(g.any() for by in told.gradients.values() for g in by.values())
    assert not any(terms.loss.any() or terms.kept.any() for terms in told.terms.values())
    assert all(mean.count == 0 or np.isfinite(mean.total) for mean in told.metrics.values())


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.adds_up])
def test_kept_and_dropped_add_up_to_the_sampled_tokens(name: str) -> None:
    for regime in REGIMES:
        told = plain(regime)[name]
        sampled = sum(int(own["mask"].sum()) for own in trajectories(regime))
        kept = sum(int(terms.kept.sum()) for terms in told.terms.values())
        dropped = {n: mean for n, mean in told.metrics.items() if n.endswith("/dropped")}
        assert kept + sum(float(mean.total) for mean in dropped.values()) == sampled
        masked = told.metrics[names.MASKED_SHARE]
        assert (float(masked.total), float(masked.count)) == (sampled - kept, sampled)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.linear])
def test_the_weight_is_the_slope_of_the_loss(name: str) -> None:
    for regime in REGIMES:
        for sign in (1.0, -1.0):
            told = unit(regime, sign)[name]
            for number, gradient in told.gradients["current"].items():
                np.testing.assert_allclose(
                    told.terms[number].weight, -sign * gradient, rtol=2e-5, atol=2e-6
                )
