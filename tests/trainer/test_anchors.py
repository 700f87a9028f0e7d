"""Weights beside the policy: where they start, how they follow it, and the scores under them."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.losses.combine import chain
from rl_jax.losses.masks import two_sided_mask
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.recipes import dis
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, LossTransform, Scores, Terms, ema, stateless, teacher
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean
from rl_jax.trainer.anchors import anchors, first_anchors, teachers
from rl_jax.trainer.batches import Batch, Shape
from rl_jax.trainer.state import TrainState, after_push, init_state
from rl_jax.trainer.step import make_train_step
from tests.fakes.bigram import bigram, logprobs, table
from tests.fakes.compiling import QUICK
from tests.losses.terms import numbers
from tests.trainer.build import VOCAB, batch_of, descent, random_trajectories

MODEL = bigram(VOCAB)
SHAPE = Shape(2, 2, 128)
EMA, NARROW = ema(0.75), ema(0.5, 0.9)
DESCENT = descent()
OWN = random_trajectories((100, 70, 30), spread=1.5)
DIS = dis()


def seen(score: str) -> LossTransform:
    """Tells the mean of a score, and has no gradient of its own."""

    def apply(scores: Scores, terms: Terms) -> Any:
        values = scores.score(score, "seen")
        return terms, {f"seen/{score}": Mean.of(values, scores.mask.astype(jnp.float32))}

    return stateless("seen", apply, [score])


@cache
def loss(*scores: str, low: float = 0.3, high: float = 5.0) -> Loss:
    parts = current_over_behavior(), two_sided_mask(low, high), policy_gradient()
    return Loss(chain(*map(seen, scores), *parts), token_mean)


def start(own: Loss, known: dict[str, Any] | None = None) -> TrainState:
    policy = table(VOCAB)
    params = {"policy": policy} | first_anchors(own.transform.needs, policy, known or {})
    return init_state(params, {"policy": DESCENT}, {"policy": own.transform.init()})


@cache
def step(own: Loss) -> Any:
    made = make_train_step(MODEL, own, {"policy": DESCENT}, vocab_chunk=4)
    return jax.jit(made, compiler_options=QUICK)


def batch(own: Loss) -> Batch:
    return batch_of(OWN, SHAPE, own, [1.0, -0.5, 2.0])


def weights(state: TrainState, name: str) -> np.ndarray:
    return np.asarray(state.params[name]["table"])


def mean_logprob(weights: np.ndarray) -> float:
    return float(np.concatenate([logprobs(weights, t.tokens)[t.loss_mask] for t in OWN]).mean())


def test_what_a_need_stands_for() -> None:
    needs = {"value", "entropy", "reference", teacher("b"), teacher("a"), EMA}
    assert anchors(needs) == (EMA, "reference", "teacher(a)", "teacher(b)")
    assert teachers(needs) == ("a", "b")
    known = {"a": "weights of a", "b": "weights of b", "c": "asked for by nobody"}
    assert first_anchors(needs, "policy", known) == {
        EMA: "policy",
        "reference": "policy",
        "teacher(a)": "weights of a",
        "teacher(b)": "weights of b",
    }


def test_every_score_is_under_its_own_weights() -> None:
    """After a step that moved the policy: its own, the average, version 0 and another model's."""
    scores = ("reference", "proximal", EMA, teacher("old"))
    own = loss(*scores)
    state = start(own, {"old": table(VOCAB, seed=4)})
    state, _ = step(own)(state, batch(own))
    _, report = step(own)(state, batch(own))
    said = numbers(report.metrics)
    for name in scores:
        assert said[f"seen/{name}"] == pytest.approx(mean_logprob(weights(state, name)), rel=1e-5)
    current = -said["policy/neg_logprob"]
    assert current == pytest.approx(mean_logprob(weights(state, "policy")), rel=1e-5)
    assert len({round(said[f"seen/{name}"], 6) for name in scores}) == 3, "proximal = reference"


def test_anchors_move_nothing() -> None:
    """The same update as without them, and they keep their bits."""
    own = loss("reference", "proximal", teacher("old"))
    known = {"old": table(VOCAB, seed=4)}
    state, _ = step(own)(start(own, known), batch(own))
    alone, _ = step(loss())(start(loss()), batch(own))
    np.testing.assert_allclose(weights(state, "policy"), weights(alone, "policy"), atol=1e-7)
    for name in ("reference", "proximal", teacher("old")):
        before = weights(start(own, known), name)
        assert weights(state, name).tobytes() == before.tobytes()


def test_the_proximal_policy_is_the_one_of_the_last_push() -> None:
    own = loss("proximal", "reference")
    state = start(own)
    first = weights(state, "policy")
    for update in range(1, 6):
        state, _ = step(own)(state, batch(own))
        if update in (2, 4):
            state = after_push(state, {"policy": DESCENT})
            pushed = weights(state, "policy")
        if update == 1:
            assert weights(state, "proximal").tobytes() == first.tobytes()
        else:
            assert weights(state, "proximal").tobytes() == pushed.tobytes()
    assert weights(state, "policy").tobytes() != pushed.tobytes()
    assert weights(state, "reference").tobytes() == first.tobytes(), "pushes do not move it"


def test_an_average_by_hand() -> None:
    own = loss(EMA)
    state = start(own)
    average = np.float64(weights(state, EMA))
    for _ in range(4):
        state, _ = step(own)(state, batch(own))
        average = 0.75 * average + 0.25 * np.float64(weights(state, "policy"))
        np.testing.assert_allclose(weights(state, EMA), average, atol=1e-6)
    assert np.abs(average - weights(state, "policy")).max() > 1e-3
    state = after_push(state, {"policy": DESCENT})
    np.testing.assert_allclose(weights(state, EMA), average, atol=1e-6, err_msg="a push leaves it")


@pytest.mark.parametrize(("high", "resets"), [(5.0, False), (0.05, True)])
def test_an_average_starts_anew_where_too_little_is_kept(high: float, resets: bool) -> None:
    """The band decides how much the update keeps; the average is reset below nine tenths."""
    own = loss(NARROW, low=0.95 if not resets else 0.05, high=60.0 if not resets else high)
    state, report = step(own)(start(own), batch(own))
    kept = 1.0 - numbers(report.metrics)[names.MASKED_SHARE]
    assert (kept < 0.9) == resets and kept > 0
    new, old = weights(state, "policy"), weights(start(own), "policy")
    want = new if resets else 0.5 * old + 0.5 * new
    np.testing.assert_allclose(weights(state, NARROW), want, atol=1e-6)


def test_a_step_that_is_not_applied_moves_no_average() -> None:
    own = loss(EMA)
    poisoned = batch(own)
    poisoned.advantages[poisoned.mask] = np.nan
    state, report = step(own)(start(own), poisoned)
    assert not np.isfinite(report.loss)
    assert weights(state, EMA).tobytes() == weights(start(own), EMA).tobytes()


@pytest.mark.parametrize("shape", [Shape(1, 8, 128), Shape(2, 2, 128), Shape(7, 1, 128)])
def test_the_split_changes_nothing(shape: Shape) -> None:
    own = loss("proximal", NARROW, "entropy")
    whole, report = step(own)(start(own), batch(own))
    other, again = step(own)(start(own), batch_of(OWN, shape, own, [1.0, -0.5, 2.0]))
    for name in ("policy", NARROW, "proximal"):
        np.testing.assert_allclose(weights(other, name), weights(whole, name), atol=1e-6)
    assert numbers(again.metrics) == pytest.approx(numbers(report.metrics), rel=1e-5, abs=1e-6)
