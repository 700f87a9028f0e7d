"""The table has every public transform and recipe, with the scores that it really reads."""

import importlib
import inspect
import pkgutil
from types import FunctionType

import pytest

from rl_jax import losses
from rl_jax.losses import recipes
from rl_jax.losses.types import Loss, LossTransform, stateless
from tests.losses.conformance.cases import CASES

COVERED = {name.split(":")[0] for name in CASES}


def public(returning: type) -> dict[str, FunctionType]:
    """Functions of the library's files that are annotated to return this."""
    found = {}
    for file in pkgutil.iter_modules(losses.__path__):
        module = importlib.import_module(f"{losses.__name__}.{file.name}")
        for name, value in inspect.getmembers(module, inspect.isfunction):
            own = value.__module__ == module.__name__ and not name.startswith("_")
            if own and inspect.signature(value).return_annotation is returning:
                found[name] = value
    return found


def test_every_public_transform_is_in_the_table() -> None:
    there = public(LossTransform)
    assert len(there) > 20
    assert not there.keys() - COVERED - {stateless.__name__}


def test_every_recipe_is_in_the_table() -> None:
    there = public(Loss)
    assert {"dis", "grpo", "gspo"} <= there.keys()
    assert not there.keys() - COVERED


def test_every_name_of_the_table_is_public() -> None:
    assert not COVERED - public(LossTransform).keys() - public(Loss).keys()


def test_the_package_exports_every_transform() -> None:
    assert not public(LossTransform).keys() - set(losses.__all__)
    assert all(getattr(losses, name) is value for name, value in public(LossTransform).items())
    assert losses.recipes is recipes


@pytest.mark.parametrize("name", CASES)
def test_a_case_says_what_it_needs(name: str) -> None:
    assert CASES[name].transform().needs == set(CASES[name].needs)
