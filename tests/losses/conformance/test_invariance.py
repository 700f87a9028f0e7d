"""What must not matter: padding, rows and offsets, microbatches, devices, tokens not sampled."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.sharding import DATA
from tests.losses.conformance.batches import (
    ELSEWHERE,
    HOME,
    OTHERS,
    SPLITS,
    cut,
    laid,
    trajectories,
)
from tests.losses.conformance.cases import CASES
from tests.losses.conformance.programs import PLAIN, Told, run, sharded_program

REGIME, SPREAD = "middle", "each in its row"


def same(got: Told, want: Told) -> None:
    """To the last bits: sums are taken in another order."""
    close = {"rtol": 5e-6, "atol": 1e-6}
    np.testing.assert_allclose(got.loss, want.loss, **close)
    for name, gradients in want.gradients.items():
        for number, gradient in gradients.items():
            np.testing.assert_allclose(got.gradients[name][number], gradient, **close)
    for number, terms in want.terms.items():
        np.testing.assert_array_equal(got.terms[number].kept, terms.kept)
        np.testing.assert_allclose(got.terms[number].weight, terms.weight, **close)
    assert got.metrics.keys() == want.metrics.keys()
    for name, mean in want.metrics.items():
        np.testing.assert_allclose(got.metrics[name], mean, rtol=2e-5, atol=1e-5, err_msg=name)


@cache
def at_home() -> dict[str, Told]:
    return run(trajectories(REGIME), [HOME])


@cache
def elsewhere(where: str) -> dict[str, Told]:
    return run(trajectories(REGIME), [ELSEWHERE[where]])


@cache
def split(count: int) -> dict[str, Told]:
    return run(trajectories(REGIME), SPLITS[count])


@pytest.mark.parametrize("name", CASES)
def test_rows_offsets_and_padding_do_not_matter(name: str) -> None:
    for where in ELSEWHERE:
        same(elsewhere(where)[name], at_home()[name])


@pytest.mark.parametrize("name", CASES)
def test_the_split_into_microbatches_does_not_matter(name: str) -> None:
    for count, layouts in SPLITS.items():
        assert len(layouts) == count
        same(split(count)[name], at_home()[name])


JUNK: dict[str, Any] = {
    "behavior": -np.inf,
    "advantages": np.nan,
    "lag": 10_000,
    "tasks": 7,
    "returns": np.inf,
    **dict.fromkeys(OTHERS, np.nan),
}


@cache
def with_junk(current: str) -> dict[str, Told]:
    return run(trajectories(REGIME), [HOME], fill=JUNK | {"current": float(current)})


@pytest.mark.parametrize("name", CASES)
def test_what_was_not_sampled_does_not_matter_to_a_bit(name: str) -> None:
    want = at_home()[name]
    for current in ("nan", "-inf", "3"):
        got = with_junk(current)[name]
        assert got.loss == want.loss
        for score, gradients in want.gradients.items():
            for number, gradient in gradients.items():
                np.testing.assert_array_equal(got.gradients[score][number], gradient)
        for number, terms in want.terms.items():
            for field, one, other in zip(terms._fields, got.terms[number], terms, strict=True):
                np.testing.assert_array_equal(one, other, f"{field} of {number}")
        for metric, mean in want.metrics.items():
            assert got.metrics[metric] == mean, metric


@cache
def sharded(devices: int) -> dict[str, Any]:
    """(loss, gradients) with the rows over the devices."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (DATA,))
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    inputs = laid(trajectories(REGIME), ELSEWHERE[SPREAD], OTHERS)
    scores, weights = jax.device_put(inputs, rows)
    assert len(scores.current.sharding.device_set) == devices
    return jax.device_get(sharded_program()(scores, weights))


@pytest.mark.parametrize("name", PLAIN)
def test_the_number_of_devices_does_not_matter(name: str) -> None:
    want = elsewhere(SPREAD)[name]
    for devices in (2, 4):
        loss, gradients = sharded(devices)[name]
        np.testing.assert_allclose(loss, want.loss, rtol=5e-6, atol=1e-6)
        for score, by_trajectory in want.gradients.items():
            got = cut(gradients[score], ELSEWHERE[SPREAD])
            for number, gradient in by_trajectory.items():
                np.testing.assert_allclose(got[number], gradient, rtol=5e-6, atol=1e-6)
