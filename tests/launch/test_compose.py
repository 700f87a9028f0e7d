"""Losses and advantages that a configuration names: found, called with keywords, checked."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launch import compose
from launch.code import ROOT
from rl_jax import advantages
from rl_jax.advantages import Estimates, group_mean
from rl_jax.config.base import UserError
from rl_jax.config.load import load, resolved
from rl_jax.config.run import ADVANTAGES, RECIPES, RunConfig
from rl_jax.losses import recipes
from rl_jax.losses.evaluate import evaluate, make_scores
from rl_jax.losses.types import Loss
from rl_jax.metrics import names
from tests.trajectories.build import group as make_group

OWN = """
from typing import Literal

from rl_jax.advantages import Advantage, group_mean
from rl_jax.losses.bounds import weigh
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, stateless

CALLS = []

def soft(scale: float, *, kind: Literal["tv", "kl"] = "tv", cap: float | None = None, of=(1, 2)):
    CALLS.append((scale, kind, cap, of))
    if scale < 0:
        raise ValueError("soft: scale must not be negative")
    return Loss(chain(current_over_behavior(), policy_gradient()), token_mean)

def bare():
    return chain(policy_gradient())

def listed():
    return Loss([policy_gradient()], token_mean)

def unreduced():
    return Loss(policy_gradient(), None)

def nothing():
    return None

def any_keyword(**keywords):
    return soft(**keywords)

def positional(scale, /):
    return soft(scale)

def unannotated(scale=1.0):
    return soft(scale + 1.0)

def dropping():
    return Loss(chain(current_over_behavior(), weigh()), token_mean)

def constant():
    def apply(scores, terms):
        return terms._replace(loss=terms.loss + 1.0), {}
    return Loss(chain(stateless("constant", apply), policy_gradient(), clear), token_mean)

clear = stateless("clear", lambda scores, terms: (terms._replace(loss=0.0 * terms.kept), {}))

def untraceable():
    def apply(scores, terms):
        return terms._replace(loss=terms.loss * float(scores.current.sum())), {}
    return Loss(stateless("untraceable", apply), token_mean)

def undeclared():
    def apply(scores, terms):
        return terms._replace(loss=scores.score("reference", "undeclared")), {}
    return Loss(stateless("undeclared", apply), token_mean)

def wrong_shape():
    apply = lambda scores, terms: (terms._replace(loss=terms.loss[:, 1:]), {})
    return Loss(stateless("wrong_shape", apply), token_mean)

def unweighed():
    return Loss(policy_gradient(), lambda trajectories: [1.0 for _ in trajectories])

def half(share: float = 0.5) -> Advantage:
    return group_mean()

made = soft(1.0)
"""


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "test", **sections})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return "own.py"


def refused(**sections: object) -> str:
    with pytest.raises(UserError) as caught:
        compose.with_defaults(config(**sections))
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_imports_from_a_package() -> None:
    assert compose.imported("rl_jax.advantages:group_mean", "advantage.name") is group_mean


def test_imports_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "json.py"  # must not get in the way of the module of that name
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Mine:\n"
        "    size: int = 3\n"
    )
    assert compose.imported(f"{file}:Mine", "task.name")().size == 3
    import json

    assert json.loads("[1]") == [1]


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for value in ("1", "22"):
        file.write_text(f"own = {value}\n")
        assert compose.imported(f"{file}:own", "task.name") == int(value)


def test_a_file_that_did_not_change_is_executed_once(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text("own = object()\n")
    first = compose.imported(f"{file}:own", "task.name")
    assert compose.imported(f"{file}:own", "task.name") is first


def test_a_directory_may_have_a_colon(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "mine.py").write_text("own = 3\n")
    assert compose.imported(f"{tmp_path}/a:b/mine.py:own", "task.name") == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_package:thing", "No module named 'no_such_package'"),
        ("rl_jax.no_such_module:thing", "No module named 'rl_jax.no_such_module'"),
        ("rl_jax.advantages:no_such_thing", "has no attribute 'no_such_thing'"),
        ("rl_jax.advantages", "Empty module name"),
        ("{folder}/fails.py:thing", "KeyError: 'missing'"),
        ("{folder}/leaves.py:thing", "SystemExit: 3"),
        ("{folder}/missing.py:thing", "No such file or directory"),
        ("{folder}/broken.py:thing", "invalid syntax"),
        ("{folder}/imports.py:thing", "No module named 'no_such_package'"),
        ("{folder}/empty.py:thing", "has no attribute 'thing'"),
        ("{folder}/folder.py:thing", "Is a directory"),
    ],
)
def test_what_cannot_be_imported_is_the_users_error(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "broken.py").write_text("def :\n")
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "fails.py").write_text("{}['missing']\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "folder.py").mkdir()
    name = name.format(folder=tmp_path)
    with pytest.raises(UserError) as caught:
        compose.imported(name, "task.name")
    said = str(caught.value)
    assert said.startswith(f"task.name = {name!r} cannot be imported: ")
    assert why in said
    assert "\n" not in said


WITHOUT_DEFAULTS = {"mopd": {"tasks": ["lookup"], "teachers": ["large"]}}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_there_is_can_be_named(name: str) -> None:
    loss = {"recipe": name} | WITHOUT_DEFAULTS.get(name, {})
    assert isinstance(compose.build_loss(config(loss=loss)), Loss)


def test_no_recipe_is_left_out() -> None:
    made_here = {
        name
        for name, value in vars(recipes).items()
        if inspect.isfunction(value) and value.__module__ == recipes.__name__ and name[0] != "_"
    }
    assert made_here == {*RECIPES, "supervised", "critic"}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_there_is_can_be_named(name: str) -> None:
    made = compose.build_advantage(config(advantage={"name": name}))
    assert isinstance(made, advantages.Advantage)


def test_no_advantage_is_left_out() -> None:
    made_here = {
        name
        for name, value in vars(advantages).items()
        if inspect.isfunction(value)
        and inspect.signature(value).return_annotation is advantages.Advantage
    }
    assert made_here == set(ADVANTAGES)


def kept(own: RunConfig, ratios: list[float], lag: list[int] | None = None) -> list[bool]:
    """Which tokens have a gradient under the configuration's loss."""
    current = np.log(np.array([ratios], np.float32))
    zeros = np.zeros_like(current)
    lags = None if lag is None else np.array([lag])
    scores = make_scores(current, zeros, zeros == 0, zeros + 1, lag=lags)
    return evaluate(compose.build_loss(own).transform, scores)[0].kept[0].tolist()


def test_the_band_of_the_loss_is_the_configurations() -> None:
    own = config(loss={"eps_low": 0.1, "eps_high": 0.2})
    assert kept(own, [0.89, 0.91, 1.19, 1.21]) == [False, True, True, False]
    assert kept(config(), [0.69, 0.71, 5.9, 6.1]) == [False, True, True, False]


@pytest.mark.parametrize("recipe", ["dis", "own.py:soft"])
def test_stale_tokens_are_masked_before_any_loss(own: str, recipe: str) -> None:
    loss = {"recipe": recipe} | ({"scale": 1} if recipe != "dis" else {})
    masked = config(loss=loss, staleness={"tau": 2, "when_stale": "mask"})
    assert kept(masked, [1.0, 1.0, 1.0], [1, 2, 3]) == [True, True, False]
    dropped = config(loss=loss, staleness={"tau": 2})
    assert kept(dropped, [1.0, 1.0, 1.0], [1, 2, 3]) == [True, True, True]


def test_a_loss_of_ones_own_gets_the_sections_keywords(own: str) -> None:
    loss = {"recipe": "own.py:soft", "scale": 2, "kind": "kl", "of": ["a"]}
    compose.build_loss(config(loss=loss))
    assert sys.modules["file:own.py"].CALLS[-1] == (2.0, "kl", None, ("a",))
    assert isinstance(sys.modules["file:own.py"].CALLS[-1][0], float)
    loss = {"recipe": "own.py:any_keyword", "scale": 3.0}
    assert isinstance(compose.build_loss(config(loss=loss)), Loss)


def test_an_advantage_of_ones_own(own: str) -> None:
    made = compose.build_advantage(config(advantage={"name": "own.py:half", "share": 1}))
    group = make_group()
    again = group_mean().of_group(group, Estimates())
    for a, b in zip(made.of_group(group, Estimates()), again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"recipe": "own.py:soft", "scal": 1},
         'unknown key loss.scal: "own.py:soft" takes scale, kind, cap, of'),
        ({"recipe": "own.py:bare", "x": 1}, 'unknown key loss.x: "own.py:bare" takes no keywords'),
        ({"recipe": "own.py:soft"}, 'loss.scale is missing: "own.py:soft" needs it'),
        ({"recipe": "own.py:soft", "scale": "a"}, 'loss.scale = "a": needs a number'),
        ({"recipe": "own.py:soft", "scale": True}, "loss.scale = true: needs a number"),
        ({"recipe": "own.py:soft", "scale": 1, "kind": "js"},
         'loss.kind = "js": needs "tv" or "kl"'),
        ({"recipe": "own.py:soft", "scale": 1, "cap": [1]},
         "loss.cap = [1]: needs a number, or leave the key out"),
        ({"recipe": "own.py:soft", "scale": -1},
         'loss.recipe = "own.py:soft": soft: scale must not be negative'),
        ({"recipe": "own.py:bare"},
         'loss.recipe = "own.py:bare" returns the bare transform chain: it needs a reduction, '
         "as in Loss(transform, token_mean)"),
        ({"recipe": "own.py:listed"}, "the transform of its Loss is list, needs a LossTransform"),
        ({"recipe": "own.py:unreduced"}, "the reduction of its Loss is NoneType, needs a function"),
        ({"recipe": "own.py:nothing"},
         'loss.recipe = "own.py:nothing" returns NoneType, needs an rl_jax.losses.Loss'),
        ({"recipe": "own.py:made"},
         'loss.recipe = "own.py:made" is Loss, needs a function that takes keywords'),
        ({"recipe": "own.py:half"}, 'loss.recipe = "own.py:half" returns Advantage, needs an rl_j'),
        ({"recipe": "no_such:f"}, "loss.recipe = 'no_such:f' cannot be imported: No module named"),
        ({"recipe": "own.py:positional", "scale": 1},
         'loss.recipe = "own.py:positional" takes scale by position only, needs one that takes'),
        ({"recipe": "own.py:unannotated", "scale": "a"},
         'loss.recipe = "own.py:unannotated": TypeError: can only concatenate str'),
        ({"recipe": "builtins:max"},
         'loss.recipe = "builtins:max" does not say what it takes, needs a function that takes'),
        ({"recipe": "mopd", "tasks": "lookup", "teachers": ["a"]},
         'loss.tasks = "lookup": needs a list, each a string'),
        ({"recipe": "mopd", "tasks": [1], "teachers": ["a"]},
         "loss.tasks = [1]: needs a list, each a string"),
        ({"recipe": "own.py:untraceable"},
         'loss.recipe = "own.py:untraceable": ConcretizationTypeError: Abstract tracer value'),
        ({"recipe": "own.py:undeclared"},
         "\"own.py:undeclared\": undeclared: the batch lacks the score 'reference'"),
        ({"recipe": "own.py:wrong_shape"},
         '"own.py:wrong_shape": wrong_shape: returned loss as float32[2, 7], needs float32[2, 8]'),
        ({"recipe": "own.py:unweighed"},
         '"own.py:unweighed": unweighed: float64[] for RolloutKey('),
        ({"recipe": "own.py:dropping"},
         'loss.recipe = "own.py:dropping": no part writes a loss that the policy can follow; end '
         "the chain with policy_gradient(), clipped()"),
        ({"recipe": "own.py:constant"}, "no part writes a loss that the policy can follow"),
        ({"eps_low": 1.5}, 'loss.recipe = "dis": two_sided_mask: eps_low must lie in (0, 1), got'),
    ],
)  # fmt: skip
def test_a_wrong_loss_is_one_line(own: str, loss: dict, said: str) -> None:
    assert said in refused(loss=loss)


def test_a_wrong_advantage_is_one_line(own: str) -> None:
    wrong = {"name": "own.py:soft", "scale": 1}
    assert 'advantage.name = "own.py:soft" returns Loss, needs an' in refused(advantage=wrong)
    assert 'unknown key advantage.lam: "group_mean" takes no keywords' in refused(
        advantage={"name": "group_mean", "lam": 0.9}
    )
    assert (
        'advantage.of = "gae": needs rl_jax.advantages.Advantage | None, which no file can say'
        in refused(advantage={"name": "batch_standardised", "of": "gae"})
    )


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_is_refused_when_it_is_traced(name: str) -> None:
    loss = {"recipe": name} | WITHOUT_DEFAULTS.get(name, {})
    compose.with_defaults(config(loss=loss))


def test_tracing_takes_no_device() -> None:
    """The launcher of processes must leave them to its roles."""
    program = (
        "from launch.compose import with_defaults\n"
        "from rl_jax.config.run import RunConfig\n"
        "with_defaults(RunConfig.model_validate({'name': 'x', 'loss': {'recipe': 'm2po'}}))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(ROOT)})


def test_a_keyword_cannot_take_the_place_of_the_name(own: str) -> None:
    """A function may call a parameter of its own `recipe`."""
    Path("named.py").write_text(OWN + "\ndef named(recipe: str = 'x'):\n    return soft(1.0)\n")
    full = compose.with_defaults(config(loss={"recipe": "named.py:named"}))
    assert full.loss.recipe == "named.py:named"


def test_the_resolved_configuration_lists_the_defaults(own: str, tmp_path: Path) -> None:
    full = compose.with_defaults(config(loss={"eps_high": 2}))
    text = resolved(full)
    assert re.search(r'\[loss\]\nrecipe = "dis"\neps_low = 0\.3\neps_high = 2\n', text)
    assert re.search(r'\[advantage\]\nname = "standardised"\nepsilon = 1e-06\n', text)
    (tmp_path / "again.toml").write_text(text)
    assert load(tmp_path / "again.toml") == full
    assert compose.with_defaults(full) == full
    mine = compose.with_defaults(config(loss={"recipe": "own.py:soft", "scale": 2}))
    # None, which TOML has not, is left out.
    assert mine.loss.keywords == {"kind": "tv", "of": (1, 2), "scale": 2}


def test_masking_by_lag_reports_its_share(own: str) -> None:
    masked = config(staleness={"tau": 1, "when_stale": "mask"})
    one = np.zeros((1, 4), np.float32)
    scores = make_scores(one, one, one == 0, one, lag=np.array([[0, 1, 2, 3]]))
    _, metrics = evaluate(compose.build_loss(masked).transform, scores)
    assert float(metrics[names.STALE_SHARE].compute()) == 0.5
    assert float(metrics[names.MASKED_SHARE].compute()) == 0.5
