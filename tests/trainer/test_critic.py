"""The critic against numpy on the bigram: values, gradient, what it leaves alone, estimates."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.advantages import LOG_RATIOS, VALUES
from rl_jax.losses.recipes import critic, dis
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, stateless
from rl_jax.metrics import names
from rl_jax.trainer.batches import Batch, Shape, build_batch, cut, with_advantages
from rl_jax.trainer.critic import (
    explained_variance,
    first_critic,
    make_critic_step,
    make_estimates,
)
from rl_jax.trainer.state import Optimizer, TrainState, adam, init_state
from rl_jax.trainer.step import StepReport, make_train_step
from rl_jax.trajectories.types import Trajectory
from tests.fakes.bigram import bigram, logprobs, table
from tests.fakes.compiling import QUICK
from tests.losses.terms import numbers
from tests.trainer.build import VOCAB, descent, random_trajectories, trajectory_of

MODEL = bigram(VOCAB)
TABLE = np.asarray(table(VOCAB)["table"])
TRUNK = np.asarray(table(VOCAB, seed=5)["table"])
WEIGHT = np.random.default_rng(6).normal(size=VOCAB).astype(np.float32)
BIAS = np.float32(0.25)
SHAPE = Shape(microbatches=2, rows=2, row_length=128)
LENGTHS = (100, 70, 64, 50, 30, 10)
DIS, CRITIC, DESCENT = dis(), critic(), descent()


class Case(NamedTuple):
    own: list[Trajectory]
    returns: list[np.ndarray]
    batch: Batch
    weights: list[np.ndarray]


@cache
def case(shape: Shape = SHAPE) -> Case:
    draws = np.random.default_rng(7)
    own = random_trajectories(LENGTHS)
    returns = [draws.normal(size=n).astype(np.float32) for n in LENGTHS]
    advantages = [draws.normal(size=n).astype(np.float32) for n in LENGTHS]
    batch, places, _ = build_batch(own, token_mean, 2, shape)
    return Case(own, returns, with_advantages(batch, places, advantages, returns), token_mean(own))


def start(critic_optimizer: Optimizer = DESCENT, policy: Optimizer = DESCENT) -> TrainState:
    params = {
        "policy": table(VOCAB),
        "critic": {
            "trunk": {"table": jnp.asarray(TRUNK)},
            "head": {"weight": jnp.asarray(WEIGHT), "bias": jnp.asarray(BIAS)},
        },
    }
    optimizers = {"policy": policy, "critic": critic_optimizer}
    losses = {"policy": DIS.transform.init(), "critic": CRITIC.transform.init()}
    return init_state(params, optimizers, losses)


@cache
def critic_step(optimizer: Optimizer) -> Any:
    return jax.jit(make_critic_step(MODEL, CRITIC, {"critic": optimizer}), compiler_options=QUICK)


@cache
def policy_step(optimizer: Optimizer, loss: Loss = DIS) -> Any:
    made = make_train_step(MODEL, loss, {"policy": optimizer}, vocab_chunk=4)
    return jax.jit(made, compiler_options=QUICK)


def run(batch: Batch, optimizer: Optimizer = DESCENT) -> tuple[TrainState, StepReport]:
    return jax.block_until_ready(critic_step(optimizer)(start(optimizer), batch))


def values(tokens: np.ndarray) -> np.ndarray:
    """float64[T]: before each token, from the row of the token before it; entry 0 is 0."""
    own = np.zeros(len(tokens))
    own[1:] = np.float64(TRUNK)[tokens[:-1]] @ np.float64(WEIGHT) + BIAS
    return own


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_the_gradient_by_hand() -> None:
    own = case()
    trunk, weight, bias, loss = np.zeros(TRUNK.shape), np.zeros(VOCAB), 0.0, 0.0
    for t, returns, weights in zip(own.own, own.returns, own.weights, strict=True):
        error = weights * (values(t.tokens) - returns)  # the weights are 0 where nothing is sampled
        loss += 0.5 * float(error @ (values(t.tokens) - returns))
        for before, e in zip(t.tokens[:-1], error[1:], strict=True):
            trunk[before] += e * WEIGHT
            weight += e * TRUNK[before]
            bias += e
    state, report = run(own.batch)
    moved = state.params["critic"]
    np.testing.assert_allclose(TRUNK - moved["trunk"]["table"], trunk, atol=1e-6)
    np.testing.assert_allclose(WEIGHT - moved["head"]["weight"], weight, atol=1e-6)
    assert float(BIAS - moved["head"]["bias"]) == pytest.approx(bias, abs=1e-6)
    assert float(report.loss) == pytest.approx(loss, rel=1e-5)
    norm = np.sqrt((trunk**2).sum() + (weight**2).sum() + bias**2)
    assert float(report.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert sorted(report.finite) == [
        "critic.head.bias", "critic.head.weight", "critic.trunk.table"
    ]  # fmt: skip


def test_a_critics_step_is_the_critics_alone() -> None:
    before = start()
    state, _ = critic_step(DESCENT)(before, case().batch)
    assert bits(state.params["policy"]) == bits(before.params["policy"])
    assert int(state.step) == 0, "schedules follow the policy's updates"
    state, _ = policy_step(DESCENT)(before, case().batch)
    assert bits(state.params["critic"]) == bits(before.params["critic"])
    assert bits(state.params["policy"]) != bits(before.params["policy"])
    assert int(state.step) == 1


@pytest.mark.parametrize("rows", [(1, 8), (2, 4), (7, 1)])
def test_one_microbatch_or_many_give_the_same(rows: tuple[int, int]) -> None:
    one, report = run(case().batch)
    split, other = run(case(Shape(*rows, 128)).batch)
    assert float(other.loss) == pytest.approx(float(report.loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(split.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert numbers(other.metrics) == pytest.approx(numbers(report.metrics), rel=1e-5)


def test_explained_variance_by_hand() -> None:
    own = case()
    _, report = run(own.batch)
    pairs = list(zip(own.own, own.returns, strict=True))
    returns = np.concatenate([r[t.loss_mask] for t, r in pairs])
    errors = np.concatenate([(r - values(t.tokens))[t.loss_mask] for t, r in pairs])
    means = numbers(report.metrics)
    assert means[names.CRITIC_ERROR] == pytest.approx(errors.mean(), rel=1e-5)
    want = 1.0 - errors.var() / returns.var()
    assert explained_variance(means) == pytest.approx(want, rel=1e-5)
    equal = {names.CRITIC_RETURNS: 1.0, names.CRITIC_RETURNS_SQUARED: 1.0}
    errors_of = {names.CRITIC_ERROR: 0.5, names.CRITIC_ERROR_SQUARED: 2.0}
    assert explained_variance(equal | errors_of) == 0.0


def frozen_critic(patterns: tuple[str, ...]) -> Optimizer:
    return adam(0.1, weight_decay=0.5, frozen=patterns)


@pytest.mark.parametrize(
    ("patterns", "still"),
    [
        (("trunk.*",), {"trunk"}),
        (("head.weight", "head.bias"), {"head"}),
        (("*.bias", "trunk.tab?e"), {"bias", "trunk"}),
    ],
)
def test_frozen_parameters_keep_their_bits(patterns: tuple[str, ...], still: set[str]) -> None:
    """Under weight decay, which would move what has no gradient; the others move."""
    state, report = run(case().batch, frozen_critic(patterns))
    before, after = start().params["critic"], state.params["critic"]
    leaves = {
        "trunk": (before["trunk"]["table"], after["trunk"]["table"]),
        "weight": (before["head"]["weight"], after["head"]["weight"]),
        "bias": (before["head"]["bias"], after["head"]["bias"]),
    }
    if "head" in still:
        still = still - {"head"} | {"weight", "bias"}
    assert {name for name, pair in leaves.items() if bits(pair[0]) == bits(pair[1])} == still
    assert len(report.finite) == 3 - len(still), "no gradient is computed for them"
    moments = jax.tree.leaves(state.optimizer["critic"])
    assert len(moments) == 2 * (3 - len(still)) + 1, "nor a moment kept; and the count"


def test_a_frozen_trunk_is_not_differentiated() -> None:
    """No scatter into the table: its gradient is nowhere in the program."""

    def scatters(optimizer: Optimizer) -> int:
        made = make_critic_step(MODEL, CRITIC, {"critic": optimizer})
        return str(jax.make_jaxpr(made)(start(optimizer), case().batch)).count("scatter-add")

    assert scatters(frozen_critic(())) > scatters(frozen_critic(("trunk.*",))) == 0


def test_a_critic_that_is_not_finite_is_not_applied() -> None:
    own = case()
    column = int(own.batch.mask[0, 0].argmax())
    poisoned = own.batch._replace(returns=own.batch.returns.copy())
    poisoned.returns[0, 0, column] = np.inf
    before = start(adam(0.1))
    state, report = critic_step(adam(0.1))(before, poisoned)
    assert bits(state) == bits(before)
    assert not all(map(bool, report.finite.values()))
    assert np.argwhere(report.bad_column >= 0).tolist() == [[0, 0]]
    assert int(report.bad_column[0, 0]) == column


def test_the_first_critic_is_the_policy_and_says_zero() -> None:
    made = first_critic(MODEL, table(VOCAB))
    assert bits(made["trunk"]) == bits(table(VOCAB))
    assert made["head"]["weight"].shape == (VOCAB,) and made["head"]["bias"].shape == ()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(made["head"]))


def test_a_loss_that_needs_more_than_values() -> None:
    greedy = Loss(stateless("greedy", lambda s, t: (t, {}), ["value", "entropy"]), token_mean)
    with pytest.raises(ValueError, match=r"the critic's loss needs \['entropy'\]; it has value"):
        make_critic_step(MODEL, greedy, {"critic": DESCENT})


@pytest.mark.parametrize("shape", [SHAPE, Shape(7, 1, 128)])
def test_estimates_stand_at_the_token_they_precede(shape: Shape) -> None:
    own = case(shape)
    _, places, _ = build_batch(own.own, token_mean, 2, shape)
    estimate = jax.jit(make_estimates(MODEL, (VALUES, LOG_RATIOS), vocab_chunk=4))
    found = jax.device_get(estimate(start().params, own.batch))
    assert found.keys() == {VALUES, LOG_RATIOS}
    columns = (cut(found[name], places, own.own) for name in (VALUES, LOG_RATIOS))
    for t, said, ratios in zip(own.own, *columns, strict=True):
        where = t.loss_mask
        np.testing.assert_allclose(said[where], values(t.tokens)[where], atol=1e-5)
        want = logprobs(TABLE, t.tokens) - t.behavior_logprobs
        np.testing.assert_allclose(ratios[where], want[where], atol=1e-5)
        assert not said[~where].any() and not ratios[~where].any()


def test_estimates_of_one_sort_leave_the_other_out() -> None:
    estimate = make_estimates(MODEL, (VALUES,), vocab_chunk=4)
    only = {"critic": start().params["critic"]}
    assert jax.eval_shape(estimate, only, case().batch).keys() == {VALUES}


def test_a_policy_that_rests_keeps_its_bits() -> None:
    """Under weight decay and with gradients; then it moves."""
    resting = adam(0.1, hold_steps=2, weight_decay=0.5)
    step, state = policy_step(resting), start(policy=resting)
    seen = [bits(state.params["policy"])]
    for _ in range(3):
        state, report = step(state, case().batch)
        assert float(report.grad_norm) > 0
        seen.append(bits(state.params["policy"]))
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert int(state.step) == 3


def test_a_policys_loss_may_ask_for_values() -> None:
    """They come from the critic, which gets no gradient of it."""

    def regress(scores, terms):
        loss = jnp.square(scores.score("value", "regress")) * scores.mask
        return terms._replace(loss=terms.loss + loss), {}

    asking = Loss(stateless("regress", regress, ["value"]), token_mean)
    own = [trajectory_of([1, 2, 3, 4]), replace(trajectory_of([4, 3]), temperature=0.5)]
    batch = build_batch(own, token_mean, 0, SHAPE).batch
    state, report = policy_step(DESCENT, asking)(start(), batch)
    want = np.mean(np.concatenate([values(t.tokens)[1:] for t in own]) ** 2)
    assert float(report.loss) == pytest.approx(want, rel=1e-5)
    assert float(report.grad_norm) == 0.0
    assert bits(state.params["critic"]) == bits(start().params["critic"])
