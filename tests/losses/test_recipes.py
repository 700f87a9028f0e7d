"""Recipes: each against its published formula in float64, on one batch of four trajectories."""

import inspect
import math
from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import pytest

from rl_jax.losses import recipes
from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.masks import masked_above
from rl_jax.losses.types import Loss, LossTransform, Scores, Terms, task_id
from tests.fakes.compiling import QUICK
from tests.losses.terms import scores

RANDOM = np.random.default_rng(7)
LENGTHS = (5, 3, 7, 4)
SEGMENTS = np.repeat(range(4), LENGTHS)
MU = -RANDOM.uniform(0.2, 3.0, 19)
OLD = MU + RANDOM.normal(scale=0.4, size=19)
TH = OLD + RANDOM.normal(scale=0.4, size=19)
REFERENCE = TH + RANDOM.normal(scale=0.5, size=19)
A = np.repeat([1.5, -0.7, 0.4, -1.2], LENGTHS)
R, RHO, D = TH - OLD, OLD - MU, TH - MU
"""Logarithms of current / old, old / behavior and current / behavior."""


def each_mean(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.full(n, values[i == SEGMENTS].mean()) for i, n in enumerate(LENGTHS)])


def clip_surrogate(log_ratio: np.ndarray, low: float, high: float) -> np.ndarray:
    ratio = np.exp(log_ratio)
    return np.minimum(ratio * A, np.clip(ratio, 1 - low, 1 + high) * A)


def inside(log_ratio: np.ndarray, low: float, high: float) -> np.ndarray:
    """1.0 where the ratio lies in the band."""
    return np.float64((np.exp(log_ratio) >= low) & (np.exp(log_ratio) <= high))


def k3(x: np.ndarray) -> np.ndarray:
    return np.exp(x) - 1 - x


def gmpo() -> np.ndarray:
    log_ratio = np.sign(A) * np.minimum(np.sign(A) * R, np.sign(A) * np.clip(R, -0.4, 0.4))
    return -A * np.exp(each_mean(log_ratio))


def k1_5() -> np.ndarray:
    sums = each_mean(R) * np.bincount(SEGMENTS)[SEGMENTS]
    return (A - 0.1 * sums) ** 2


def dppo() -> np.ndarray:
    moved = np.exp(TH) - np.exp(MU)
    kept = np.where(A > 0, moved <= 0.2, moved >= -0.2).astype(float)
    return -kept * np.exp(D) * A + 1e-3 * D**2


def ipo() -> np.ndarray:
    kept = np.float64(abs(np.exp(TH) - np.exp(MU)) <= 0.1)
    return -kept * np.exp(D) * A + 1e-3 * D**2


def sapo() -> np.ndarray:
    t = np.where(A > 0, 1.0, 1.05)
    return -A * 4 / t / (1 + np.exp(-t * (np.exp(R) - 1)))


def opsm() -> np.ndarray:
    return -np.float64((A > 0) | (each_mean(-D) <= 1e-4)) * clip_surrogate(R, 0.2, 0.2)


WANTED: dict[str, Callable[[], np.ndarray]] = {
    "ppo": lambda: -clip_surrogate(R, 0.2, 0.2),
    "grpo": lambda: -clip_surrogate(R, 0.2, 0.2) + 0.04 * k3(REFERENCE - TH),
    "dual_clip": lambda: (
        -np.where(
            A < 0, np.maximum(clip_surrogate(R, 0.2, 0.2), 3 * A), clip_surrogate(R, 0.2, 0.2)
        )
    ),
    "dapo": lambda: -clip_surrogate(R, 0.2, 0.28),
    "dr_grpo": lambda: -clip_surrogate(R, 0.2, 0.2),
    "gspo": lambda: -clip_surrogate(each_mean(R), 3e-4, 4e-4),
    "gmpo": gmpo,
    "cispo": lambda: -np.minimum(np.exp(R), 1.2) * A * TH,
    "tis": lambda: -np.minimum(np.exp(RHO), 2.0) * clip_surrogate(R, 0.2, 0.2),
    "mis": lambda: -inside(RHO, 0.5, 2.0) * np.exp(RHO) * clip_surrogate(R, 0.2, 0.2),
    "icepop": lambda: -inside(RHO, 0.5, 5.0) * np.exp(RHO) * clip_surrogate(R, 0.2, 0.28),
    "dis": lambda: -inside(D, 0.7, 6.0) * np.exp(D) * A * TH,
    "k2_5": lambda: -inside(R, 0.5, 2.0) * np.exp(R) * A + 1e-3 * R**2,
    "k1_5": k1_5,
    "dppo": dppo,
    "ipo": ipo,
    "aipo": lambda: -np.minimum(np.exp(D), 8.0) * A * TH,
    "decoupled_ppo": lambda: -inside(RHO, 0, 5) * np.exp(RHO) * clip_surrogate(R, 0.2, 0.2),
    # The score of the moving average is set to that of the old policy below.
    "ppo_ewma": lambda: -inside(RHO, 0.5, 2.0) * np.exp(RHO) * clip_surrogate(R, 0.2, 0.2),
    "sapo": sapo,
    "opsm": opsm,
    "dro": lambda: -(A * TH - 0.5 * 0.05 * R**2),
    "opd": lambda: -np.exp(D) * (REFERENCE - TH),
    "supervised": lambda: -TH,
    "critic": lambda: 0.5 * (OLD - A) ** 2,
}


def batch(transform: LossTransform) -> Scores:
    made = scores(TH, MU, A, segments=SEGMENTS, returns=A)
    own = {"reference": REFERENCE, "teacher(teacher)": REFERENCE, "teacher(big)": REFERENCE}
    others = {name: np.float32([own.get(name, OLD)]) for name in transform.needs}
    return made._replace(others=jax.tree.map(jax.numpy.asarray, others))


@cache
def transform_of(name: str) -> LossTransform:
    """The recipe with its defaults behind a mask by lag."""
    loss = recipes.mopd(["math"], ["big"]) if name == "mopd" else getattr(recipes, name)()
    return masked_above(loss, 3).transform


def graded(name: str, given: Scores) -> tuple[Terms, jax.Array]:
    """Terms and gradient."""

    def total(current: jax.Array) -> tuple[jax.Array, Terms]:
        terms, _ = evaluate(transform_of(name), given._replace(current=current))
        return terms.loss.sum(), terms

    slope, terms = jax.grad(total, has_aux=True)(given.current)
    return terms, slope


@cache
def program() -> Callable[[dict[str, Scores]], dict[str, tuple[Terms, jax.Array]]]:
    """All recipes compiled as one, which is faster than apart."""

    def every(batches: dict[str, Scores]) -> dict[str, tuple[Terms, jax.Array]]:
        return {name: graded(name, own) for name, own in batches.items()}

    return jax.jit(every, compiler_options=QUICK)


@cache
def results(far: float | None = None) -> dict[str, tuple[Terms, jax.Array]]:
    """By recipe; every other policy `far` away on one side or the other, at both signs of A.

    No dtype or rank is promoted silently.
    """
    batches = {name: batch(transform_of(name)) for name in public()}
    if far is not None:
        for name, given in batches.items():
            signs = jax.numpy.sign(given.advantages)
            apart = dict.fromkeys(given.others, given.current + far * signs)
            batches[name] = given._replace(behavior=given.current - far, others=apart)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return program()(batches)


@pytest.mark.parametrize("name", WANTED)
def test_against_the_formula(name: str) -> None:
    terms, _ = results()[name]
    np.testing.assert_allclose(terms.loss[0], WANTED[name](), rtol=2e-5, atol=2e-6)


def public() -> dict[str, Callable[..., Loss]]:
    own = inspect.getmembers(recipes, inspect.isfunction)
    return {name: f for name, f in own if f.__module__ == recipes.__name__}


def test_every_recipe_is_tested() -> None:
    # m2po: test_second_moment.py; mopd: below.
    assert public().keys() == WANTED.keys() | {"m2po", "mopd"}


@pytest.mark.parametrize("name", public())
def test_a_recipe_is_at_most_15_lines(name: str) -> None:
    source, _ = inspect.getsourcelines(public()[name])
    body = "".join(source).split('"""')[2].strip().splitlines()
    assert len(body) <= 15


@pytest.mark.parametrize("name", public())
def test_finite_at_any_log_ratio(name: str) -> None:
    for far in (1e4, -1e4):
        terms, slope = results(far)[name]
        for array in (terms.loss, terms.weight, slope):
            assert np.isfinite(array).all()


def test_interpolated_decoupled_ppo_needs_no_score() -> None:
    loss = recipes.decoupled_ppo(interpolated=True)
    assert loss.transform.needs == frozenset()
    given = batch(loss.transform)._replace(lag=jax.numpy.ones((1, 19), jax.numpy.int32))
    terms, _ = evaluate(loss.transform, given)
    # Half of the way is mismatch, the other half is what PPO clips.
    want = -inside(D / 2, 0, 5) * np.exp(D / 2) * clip_surrogate(D / 2, 0.2, 0.2)
    np.testing.assert_allclose(terms.loss[0], want, rtol=2e-5)


@pytest.mark.parametrize(
    ("level", "bounds"), [("sequence", (0.5, 2.0)), ("geometric", (0.75, 1.2))]
)
def test_mis_at_the_level_of_sequences(level: str, bounds: tuple[float, float]) -> None:
    loss = recipes.mis(*bounds, level=level)
    rho = each_mean(RHO) * (np.bincount(SEGMENTS)[SEGMENTS] if level == "sequence" else 1)
    kept = inside(rho, *bounds)
    assert 0 < kept.sum() < 19
    want = -kept * np.exp(rho) * clip_surrogate(R, 0.2, 0.2)
    terms, _ = evaluate(loss.transform, batch(loss.transform))
    np.testing.assert_allclose(terms.loss[0], want, rtol=2e-5)


def test_mopd_gives_each_task_its_teacher() -> None:
    loss = recipes.mopd(["math"], ["big"], bound=0.3)
    given = batch(loss.transform)
    math_tokens = SEGMENTS < 2
    tasks = np.where(math_tokens, task_id("math"), task_id("code"))
    given = given._replace(tasks=jax.numpy.asarray(tasks[None], jax.numpy.int32))
    advantages = np.where(math_tokens, np.clip(REFERENCE - TH, -0.3, 0.3), A)
    want = -inside(R, 0.5, 2.0) * np.exp(R) * advantages + 1e-3 * R**2
    terms, _ = evaluate(loss.transform, given)
    np.testing.assert_allclose(terms.loss[0], want, rtol=2e-5, atol=2e-6)


def test_grpo_without_a_penalty_needs_no_reference() -> None:
    assert recipes.grpo(beta=0.0).transform.needs == {"proximal"}
    assert recipes.ppo_ewma(window=18.0, reset_below=0.5).transform.needs == {"ema(0.9, 0.5)"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: recipes.mopd(["math"], []), "mopd: needs one teacher per task, got 0 for 1"),
        (lambda: recipes.mopd(["a", "a"], ["x", "y"]), "mopd: a task is there twice among a, a"),
        (lambda: recipes.mopd(["default"], ["x"]), "per_task: a task named 'default'"),
        (lambda: recipes.ppo(eps_low=math.nan), "clipped: eps_low must lie"),
        (
            lambda: recipes.cispo(eps_low=2.0),
            "cispo: eps_low must be below 1, got 2.0; None switches it",
        ),
    ],
)
def test_recipes_that_make_no_sense(make: Callable[[], Loss], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
