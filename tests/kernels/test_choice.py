"""Which backend is taken, and that an accelerator without a kernel is told."""

import warnings

import jax
import pytest

from rl_jax.kernels.choice import choose
from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.mla import api as mla

BACKENDS = {"chip": 1, "card": 2, "xla": 3}


def said(obstacles: dict[str, str], name: str | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            choose(name, BACKENDS, obstacles)
    return [str(x.message) for x in caught]


@pytest.mark.parametrize("place", ["gpu", "tpu"])
def test_an_accelerator_that_gets_xla_is_told_why_once(monkeypatch, place: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: place)
    why = {"chip": "no chip", "card": "width 3 is odd", "xla": ""}
    line = f"backend: xla on {place}, for chip cannot run: no chip; card cannot run: width 3 is odd"
    assert said(why) == [line]
    assert said(why) == []
    assert said(why, name="xla") == []
    assert said({**why, "card": ""}) == []


def test_a_cpu_gets_xla_in_silence(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert said({"chip": "no chip", "card": "no card", "xla": ""}) == []


def test_the_first_that_can_run_or_the_one_by_name() -> None:
    able = {"chip": "no chip", "card": "", "xla": ""}
    assert choose(None, BACKENDS, able) == 2
    assert choose("xla", BACKENDS, able) == 3
    with pytest.raises(ValueError, match="backend: chip cannot run here: no chip"):
        choose("chip", BACKENDS, able)
    with pytest.raises(ValueError, match="backend: 'cuda' is not one of chip, card, xla"):
        choose("cuda", BACKENDS, able)


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("metal", lambda: (kda.BACKENDS, kda.backends(12, 24, "float32"))),
        ("neuron", lambda: (mla.BACKENDS, mla.backends(12, 8, "float32"))),
    ],
)
def test_both_apis_have_one_to_fall_back_on(monkeypatch, place: str, found) -> None:
    """A place that is none of theirs: every kernel says so."""
    monkeypatch.setattr(jax, "default_backend", lambda: place)
    backends, obstacles = found()
    with pytest.warns(UserWarning, match=f"backend: xla on {place}, for pallas_tpu .* triton "):
        assert choose(None, backends, obstacles) is backends["xla"]
