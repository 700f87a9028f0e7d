"""[N] Errors as one line: the words for what is needed, and which key was probably meant."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from rl_jax.config.base import Section, dotted, explain, keys, requirement


class Inner(Section):
    depth: Annotated[int, Field(ge=1, le=9)] = 3
    kinds: Annotated[tuple[Literal["a", "b"], ...], Field(strict=False, min_length=1)] = ("a",)


class Outer(Section):
    name: str
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    inner: Inner = Inner()


def wrong(table: dict) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(table)
    return explain(caught.value, Outer)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "an integer"),
        (Annotated[int, Field(ge=64, multiple_of=64)], "an integer, at least 64, a multiple of 64"),
        (Annotated[float, Field(gt=0, lt=1)], "a number, above 0, below 1"),
        (Literal["drop", "wait"], '"drop" or "wait"'),
        (float | None, "a number, or leave the key out"),
        (bool, "true or false"),
        (Inner, "a table with the keys depth, kinds"),
    ],
)
def test_requirement(annotation, words):
    assert requirement(annotation) == words


def test_keys_and_dotted():
    assert list(keys(Outer)) == ["name", "share", "inner", "inner.depth", "inner.kinds"]
    assert dotted(("inner", "kinds", 1)) == "inner.kinds[1]"


@pytest.mark.parametrize(
    ("table", "key", "sentence"),
    [
        ({}, "name", "name is missing: needs a string"),
        ({"name": 3}, "name", "name = 3: needs a string"),
        ({"name": "x", "nam": 1}, "nam", "unknown key nam; did you mean name?"),
        ({"name": "x", "depth": 1}, "depth", "unknown key depth; did you mean inner.depth?"),
        ({"name": "x", "inner": {"dept": 1}}, "inner.dept",
         "unknown key inner.dept; did you mean inner.depth?"),
        ({"name": "x", "inner": {"zzz": 1}}, "inner.zzz",
         "unknown key inner.zzz; [inner] has depth, kinds"),
        ({"name": "x", "inner": {"depth": 0}}, "inner.depth",
         "inner.depth = 0: needs an integer, at least 1, at most 9"),
        ({"name": "x", "inner": {"depth": "3"}}, "inner.depth",
         'inner.depth = "3": needs an integer, at least 1, at most 9'),
        ({"name": "x", "inner": {"depth": True}}, "inner.depth",
         "inner.depth = true: needs an integer, at least 1, at most 9"),
        ({"name": "x", "inner": {"kinds": ["a", "c"]}}, "inner.kinds[1]",
         'inner.kinds[1] = "c": needs "a" or "b"'),
        ({"name": "x", "inner": {"kinds": []}}, "inner.kinds",
         'inner.kinds = []: needs a list of at least 1, each "a" or "b"'),
        ({"name": "x", "inner": 7}, "inner",
         "inner = 7: needs a table with the keys depth, kinds"),
        ({"name": "x", "share": float("nan")}, "share",
         "share = nan: needs a number, above 0, below 1, or leave the key out"),
        ({"name": 3, "inner": {"depth": 0}}, "name",
         "name = 3: needs a string (1 more wrong)"),
    ],
)  # fmt: skip
def test_explain(table, key, sentence):
    assert wrong(table) == (key, sentence)


def test_unknown_key_is_told_before_the_key_it_left_out():
    assert wrong({"nmae": "x"})[1].startswith("unknown key nmae; did you mean name?")
