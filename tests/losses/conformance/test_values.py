"""Value, gradient, what is kept and its weight: the library against the numpy form in float64."""

from functools import cache

import numpy as np
import pytest

from tests.losses.conformance.batches import HOME, REGIMES, trajectories
from tests.losses.conformance.cases import CASES
from tests.losses.conformance.oracle import Answer, answers
from tests.losses.conformance.programs import Told, run


@cache
def told(regime: str) -> dict[str, Told]:
    return run(trajectories(regime), [HOME])


@cache
def wanted(name: str, regime: str) -> list[Answer]:
    return answers(CASES[name].oracle, trajectories(regime))


def close(got: object, want: object, where: str) -> None:
    """As float32 allows, with ratios of up to e^5."""
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=where)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_numpy_form(name: str, regime: str) -> None:
    got, want = told(regime)[name], wanted(name, regime)
    weights = [own["weights"].astype(np.float64) for own in trajectories(regime)]
    whole = sum(float(w @ answer.loss) for w, answer in zip(weights, want, strict=True))
    close(got.loss, whole, "loss")
    for number, answer in enumerate(want):
        close(got.terms[number].loss, answer.loss, f"terms of {number}")
        for score, gradients in got.gradients.items():
            close(gradients[number], answer.gradients[score], f"gradient of {number} in {score}")


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_and_its_weight_are_those_of_the_numpy_form(name: str) -> None:
    for regime in REGIMES:
        for number, answer in enumerate(wanted(name, regime)):
            terms = told(regime)[name].terms[number]
            np.testing.assert_array_equal(terms.kept, answer.kept, f"kept of {number}, {regime}")
            known = ~np.isnan(answer.weight)
            close(terms.weight[known], answer.weight[known], f"weight of {number}, {regime}")


@pytest.mark.parametrize("name", CASES)
def test_the_batches_tell_apart_what_the_case_leaves_out(name: str) -> None:
    """Or a bound that never binds would pass for one that does."""
    flows, sampled = [], []
    for regime in REGIMES:
        for own, answer in zip(trajectories(regime), wanted(name, regime), strict=True):
            some = own["mask"] & (own["advantages"] != 0)
            sampled.append(some)
            flows.append(some & (sum(map(abs, answer.gradients.values())) != 0))
    trained, there = np.concatenate(flows).sum(), np.concatenate(sampled).sum()
    assert 0 < trained <= there
    assert (trained < there) == CASES[name].bites
