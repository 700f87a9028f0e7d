"""Recipes against another implementation: values and gradients that verl gave, as recorded.

`tests/interop/losses.py` made the file; `make test-interop` makes it again.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import Array
from rl_jax.losses import recipes
from rl_jax.losses.evaluate import evaluate, make_scores
from rl_jax.losses.types import Loss, Scores
from rl_jax.trajectories.types import NOT_SAMPLED
from tests.trajectories.build import trajectory

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "losses.json").read_text()
)
MASK = np.array(GOLDEN["inputs"]["mask"], bool)
RECIPES: dict[str, Callable[[], Loss]] = {
    "grpo": lambda: recipes.grpo(beta=0.0),
    "grpo_kl": recipes.grpo,
    "dapo": recipes.dapo,
    "gspo": recipes.gspo,
    "cispo": recipes.cispo,
    "tis": recipes.tis,
    "dual_clip": recipes.dual_clip,
    "dr_grpo": lambda: recipes.dr_grpo(length=16),
    "gmpo": recipes.gmpo,
    "sapo": recipes.sapo,
    "icepop": recipes.icepop,
    "dro": lambda: recipes.dro(beta=0.3),
}
"""With the settings that the file tells of verl's: where none are given, the defaults are meant."""

LAYOUTS = {
    "rows": lambda wide, there, padding: np.where(there, wide, wide.dtype.type(padding)),
    "packed": lambda wide, there, padding: wide[there][None],
}
"""A trajectory in each row, padded, or all of them in one row."""


def with_prompt(values: Any) -> np.ndarray:
    """One token in front, which was not sampled."""
    return np.pad(np.asarray(values), ((0, 0), (1, 0)))


LAST = MASK.shape[1] - MASK[:, ::-1].argmax(axis=1)
THERE = np.arange(MASK.shape[1] + 1) <= LAST[:, None]


def placed(layout: str, values: Any, padding: float = 0.0) -> np.ndarray:
    return LAYOUTS[layout](with_prompt(values), THERE, padding)


def scores(layout: str) -> Scores:
    given = {
        name: placed(layout, np.float32(GOLDEN["inputs"][name]), padding=-3.0)
        for name in ("current", "behavior", "proximal", "reference", "advantages")
    }
    numbers = np.repeat(np.arange(len(MASK))[:, None], MASK.shape[1] + 1, axis=1)
    return make_scores(
        given["current"],
        given["behavior"],
        placed(layout, MASK),
        given["advantages"],
        segments=LAYOUTS[layout](numbers, THERE, -1),
        others={name: given[name] for name in ("proximal", "reference")},
    )


def weights(loss: Loss, layout: str) -> np.ndarray:
    """What the loss's reduction makes of the trajectories."""
    versions = [
        tuple(np.where(row[:n], 0, NOT_SAMPLED).tolist()) for row, n in zip(MASK, LAST, strict=True)
    ]
    each = loss.reduction([trajectory(i, versions=v) for i, v in enumerate(versions)])
    wide = np.zeros(THERE.shape, np.float32)
    wide[THERE] = np.concatenate(each)
    return LAYOUTS[layout](wide, THERE, 0.0)


@cache
def graded(layout: str) -> dict[str, Any]:
    """((value, size), gradient) of every recipe: one program, which compiles faster than many."""
    given = scores(layout)
    made = {name: build() for name, build in RECIPES.items()}
    weigh = {name: weights(loss, layout) for name, loss in made.items()}

    def total(current: Array, name: str) -> tuple[Array, Array]:
        terms, _ = evaluate(made[name].transform, given._replace(current=current))
        # Terms of both signs cancel in the value: its error is that of their sizes.
        return jnp.sum(weigh[name] * terms.loss), jnp.sum(weigh[name] * jnp.abs(terms.loss))

    def every(current: Array) -> dict[str, Any]:
        one = jax.value_and_grad(total, has_aux=True)
        return {name: one(current, name) for name in made}

    return jax.jit(every)(given.current)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_value_and_gradient_are_those_of_verl(name: str, layout: str) -> None:
    want = GOLDEN["cases"][name]
    (value, size), gradient = graded(layout)[name]
    assert float(value) == pytest.approx(want["value"], abs=1e-6 * float(size))
    expected = placed(layout, want["gradient"])
    # Of the largest, for k3: in 1 - e^x the float32 of e^x counts. What a bound cuts is exactly 0.
    rounding = 1e-7 * float(np.abs(expected).max())
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=rounding)
    np.testing.assert_array_equal(np.asarray(gradient) != 0, expected != 0)


def test_every_recorded_case_is_compared() -> None:
    assert RECIPES.keys() == GOLDEN["cases"].keys()
