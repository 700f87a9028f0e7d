"""Bad input: an error at build or trace time that names the transform and the field."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from rl_jax import losses
from rl_jax.losses import recipes
from rl_jax.losses.combine import chain
from rl_jax.losses.evaluate import evaluate, make_scores
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import BEHAVIOR, Scores
from tests.losses.conformance.batches import HOME, laid, trajectories
from tests.losses.conformance.cases import CASES

NEEDY = [(name, score) for name, case in CASES.items() for score in case.needs]


def good(name: str) -> Scores:
    return laid(trajectories("middle"), HOME, CASES[name].needs)[0]


def on_device(scores: Scores) -> Scores:
    return jax.tree.map(jnp.asarray, scores)


def refused(name: str, scores: Scores, because: str) -> None:
    transform = CASES[name].transform()
    with pytest.raises(ValueError, match=rf"^{transform.name}: {because}"):
        evaluate(transform, scores)


@pytest.mark.parametrize("name", CASES)
def test_another_shape_or_dtype(name: str) -> None:
    scores = good(name)
    short = scores.behavior[:, 1:]
    refused(name, scores._replace(behavior=short), r"behavior has the shape \(8, 11\), current")
    half = scores.advantages.astype(np.float16)
    refused(name, scores._replace(advantages=half), "advantages is float16, needs float32")


@pytest.mark.parametrize("name", CASES)
def test_another_dtype_is_found_at_trace_time(name: str) -> None:
    scores = good(name)
    transform = CASES[name].transform()
    with pytest.raises(ValueError, match=rf"^{transform.name}: lag is float32, needs int32"):
        jax.eval_shape(lambda own: evaluate(transform, own), scores._replace(lag=scores.behavior))


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_sampled_or_no_number(name: str) -> None:
    scores = good(name)
    none = scores._replace(mask=np.zeros_like(scores.mask))
    refused(name, none, "mask is false everywhere")
    row, column = np.argwhere(scores.mask)[4]
    for field in ("current", "behavior"):
        for value in (np.nan, np.inf, -np.inf):
            broken = np.array(getattr(scores, field))
            broken[row, column] = value
            because = f"{field} is {value} at row {row}, token {column}"
            refused(name, scores._replace(**{field: broken}), because)


@pytest.mark.parametrize(("name", "score"), NEEDY)
def test_another_score_that_is_no_number(name: str, score: str) -> None:
    scores = good(name)
    broken = np.where(scores.mask, np.float32(np.nan), np.float32(0))
    others = dict(scores.others) | {score: broken}
    transform = CASES[name].transform()
    with pytest.raises(ValueError) as told:
        evaluate(transform, scores._replace(others=others))
    assert str(told.value).startswith(f"{transform.name}: {score} is nan at row 0, token")


@pytest.mark.parametrize(("name", "score"), NEEDY)
def test_a_score_that_the_batch_lacks(name: str, score: str) -> None:
    """Named with the part that asks for it, not the chain around it."""
    scores = good(name)
    others = {n: array for n, array in scores.others.items() if n != score}
    with pytest.raises(ValueError) as told:
        jax.eval_shape(
            lambda own: evaluate(CASES[name].transform(), own), scores._replace(others=others)
        )
    said = str(told.value)
    assert f": the batch lacks the score {score!r}" in said
    assert not said.startswith(("chain", "weighted_sum", "per_task"))


def test_make_scores_names_the_field() -> None:
    row = np.zeros((1, 4), np.float32)
    mask = np.ones((1, 4), bool)
    with pytest.raises(ValueError, match=r"advantages has the shape \(4,\)"):
        make_scores(row, row, mask, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="mask is float32, needs bool"):
        make_scores(row, row, row, row)
    with pytest.raises(ValueError, match="behavior is -inf at row 0, token 2"):
        make_scores(row, np.float32([[0, 0, -np.inf, 0]]), mask, row)
    with pytest.raises(ValueError, match="mask is false everywhere"):
        make_scores(row, row, ~mask, row)


def test_a_reduction_is_no_part_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run, where no hook checks annotations before."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"^chain: .* a reduction is not part of a chain"):
        chain(policy_gradient(), token_mean)  # pyright: ignore[reportArgumentType] the test
    with pytest.raises(ValueError, match=r"^chain: a Loss is no part, use its \.transform"):
        chain(recipes.dis())  # pyright: ignore[reportArgumentType] the test
    with pytest.raises(ValueError, match=r"^weighted_sum: a must be \(coefficient, transform\)"):
        losses.weighted_sum(a=policy_gradient())  # pyright: ignore[reportArgumentType] the test
    with pytest.raises(ValueError, match=r"^mask_stale: tau must be at least 0, got nan"):
        losses.mask_stale(np.nan)  # pyright: ignore[reportArgumentType] the test


NOT_POSITIVE = (0.0, -1.0, np.nan, np.inf)
REFUSED: dict[str, tuple[Callable[[float], object], str]] = {
    "truncate": (losses.truncate, "truncate: cap"),
    "clamp": (lambda x: losses.clamp(None, x), "clamp: high"),
    "clamp, low": (lambda x: losses.clamp(x, 2.0), "clamp: low"),
    "two_sided_mask": (lambda x: losses.two_sided_mask(x, 5.0), "two_sided_mask: eps_low"),
    "two_sided_mask, high": (lambda x: losses.two_sided_mask(0.3, x), "two_sided_mask: eps_high"),
    "band_mask": (lambda x: losses.band_mask(None, x), "band_mask: high"),
    "veto": (losses.veto, "veto: threshold"),
    "divergence_mask": (losses.divergence_mask, "divergence_mask: delta"),
    "second_moment_mask": (losses.second_moment_mask, "second_moment_mask: threshold"),
    "clipped": (lambda x: losses.clipped(x, 0.2), "clipped: eps_low"),
    "clipped, high": (lambda x: losses.clipped(0.2, x), "clipped: eps_high"),
    "clipped, dual": (lambda x: losses.clipped(0.2, 0.2, dual=x), "clipped: dual"),
    "soft_gated": (losses.soft_gated, "soft_gated: temperature_positive"),
    "soft_gated, negative": (
        lambda x: losses.soft_gated(1.0, x),
        "soft_gated: temperature_negative",
    ),
    "geometric_mean": (lambda x: losses.geometric_mean(x, 0.4), "geometric_mean: eps_low"),
    "squared_sequence": (losses.squared_sequence, "squared_sequence: tau"),
    "kl": (lambda x: losses.kl(coefficient=x), "kl: coefficient"),
    "adaptive_kl": (lambda x: losses.adaptive_kl(x, 1e3, 0.1), "adaptive_kl: target"),
    "adaptive_kl, horizon": (lambda x: losses.adaptive_kl(0.1, x, 0.1), "adaptive_kl: horizon"),
    "adaptive_kl, initial": (lambda x: losses.adaptive_kl(0.1, 1e3, x), "adaptive_kl: initial"),
    "entropy_bonus": (losses.entropy_bonus, "entropy_bonus: coefficient"),
    "squared_log_ratio": (losses.squared_log_ratio, "squared_log_ratio: coefficient"),
    "teacher_advantage": (
        lambda x: losses.teacher_advantage("expert", bound=x),
        "teacher_advantage: bound",
    ),
    "ppo": (recipes.ppo, "clipped: eps_low"),
    "dr_grpo": (
        lambda x: recipes.dr_grpo(length=int(np.nan_to_num(x, posinf=0))),
        "constant_norm: length",
    ),
    "sequence_kl_mask": (losses.sequence_kl_mask, "sequence_kl_mask: delta"),
    "ppo_ewma": (recipes.ppo_ewma, "ppo_ewma: window"),
    "cispo": (recipes.cispo, "cispo: eps_high"),
    "cispo, low": (lambda x: recipes.cispo(eps_low=x), "cispo: eps_low"),
    "dro": (recipes.dro, "squared_log_ratio: coefficient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_make_no_sense_are_named(name: str) -> None:
    build, because = REFUSED[name]
    for value in NOT_POSITIVE:
        with pytest.raises(ValueError, match=rf"^({because})"):
            build(value)


@pytest.mark.parametrize(
    ("build", "because"),
    [
        (lambda: losses.clamp(2.0, 0.5), "clamp: low must be below high"),
        (lambda: losses.clamp(None, None), "clamp: needs low, high or both"),
        (lambda: losses.band_mask(2.0, 0.5), "band_mask: low must be below high"),
        (lambda: losses.clipped(0.2, 0.2, dual=1.0), "clipped: dual"),
        (lambda: losses.clipped(1.0, 0.2), "clipped: eps_low"),
        (lambda: losses.veto(1e-9), "veto: threshold"),
        (lambda: losses.mask_stale(-1), "mask_stale: tau"),
        (lambda: recipes.k2_5(log_low=np.log(2.0)), "k2_5: needs -20 <= log_low < log_high <= 20"),
        (lambda: recipes.k2_5(log_low=np.nan), "k2_5: needs .*, got nan"),
        (lambda: recipes.k2_5(log_high=np.inf), "k2_5: needs .*, inf"),
        (lambda: losses.clamp(np.nan, 2.0), "clamp: low must be a number"),
        (lambda: losses.band_mask(None, np.nan), "band_mask: high must be a number"),
        (lambda: losses.estimator_mask("k1", np.nan, 1.0), "estimator_mask: low must be a number"),
        (
            lambda: losses.weighted_sum(a=(np.nan, policy_gradient())),
            "weighted_sum: the coefficient of a is nan",
        ),
        (
            lambda: losses.per_task({"default": policy_gradient()}, policy_gradient()),
            "per_task: a task named 'default'",
        ),
        (
            lambda: losses.ratio("proximal", "behaviour"),
            "proximal_over_behaviour: there is no score 'behaviour'",
        ),
        (lambda: losses.kl("old", coefficient=0.1), "kl: there is no score 'old'"),
        (lambda: losses.teacher_advantage("a b"), "teacher"),
    ],
)
def test_arguments_that_do_not_fit_are_named(build: Callable[[], object], because: str) -> None:
    with pytest.raises(ValueError, match=rf"^{because}"):
        build()


def test_a_transform_that_changes_a_dtype_is_named() -> None:
    def narrowed(scores: Scores, terms, stats, state):
        return terms._replace(factor=terms.factor.astype(jnp.float16)), {}

    broken = policy_gradient()._replace(name="narrowed", apply=narrowed)
    with pytest.raises(ValueError, match="narrowed: returned factor as float16"):
        evaluate(chain(broken, policy_gradient()), good("policy_gradient"))


@pytest.mark.parametrize(
    ("weights", "because"),
    [
        (lambda own: None, r"weights returned NoneType, needs float32\[8, 12\]"),
        (lambda own: own.lag, r"weights returned int32\[8, 12\], needs float32"),
        (
            lambda own: own.current[:, 1:],
            r"weights returned float32\[8, 11\], needs float32\[8, 12\]",
        ),
        (lambda own: own.current * np.float32(np.nan), "the weight is nan at row 0, token"),
    ],
)
def test_weights_of_ones_own_that_do_not_fit(
    weights: Callable, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    mine = chain(losses.token_weights(weights, name="mine"), policy_gradient())
    with pytest.raises(ValueError, match=f"^mine: {because}"):
        evaluate(mine, on_device(good("policy_gradient")))


def test_a_mask_behind_the_objective() -> None:
    late = chain(policy_gradient(), losses.mask_stale(2))
    with pytest.raises(ValueError, match="chain: a mask dropped tokens after an objective"):
        evaluate(late, on_device(good("policy_gradient")))


def test_a_chain_needs_a_part() -> None:
    with pytest.raises(ValueError, match="chain: needs at least one transform"):
        chain()
    assert BEHAVIOR not in CASES["policy_gradient"].transform().needs
