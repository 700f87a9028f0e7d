"""Experts in the train step against numpy: load, replayed choices, the correction bias."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.losses.recipes import dis
from rl_jax.metrics import names
from rl_jax.trainer.batches import Batch, Shape
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import OWN_CHOICES, Experts, StepReport, make_train_step
from tests.fakes.compiling import QUICK
from tests.fakes.routed import CHOSEN, EXPERTS, LAYERS, choices, routed, weights
from tests.losses.terms import numbers
from tests.trainer.build import VOCAB, batch_of, descent, random_trajectories, start

DIS, DESCENT, MODEL, WEIGHTS = dis(), descent(), routed(VOCAB), weights(VOCAB)
SHAPE = Shape(2, 2, 128)
OWN = random_trajectories((100, 70, 64, 50))


def batch(shape: Shape = SHAPE, given: Any = None) -> Batch:
    """`given` fills the choices of all real tokens; None: recorded nowhere."""
    made = batch_of(OWN, shape, DIS, [1.0, -1.0, 0.5, -0.5])
    room = np.full((*shape, LAYERS, CHOSEN), -1, np.int16)
    if given is not None:
        real = made.segment_ids >= 0
        room[real] = given(made.tokens[real])
    return made._replace(choices=room)


@cache
def step(experts: Experts = OWN_CHOICES) -> Any:
    own = {"policy": DESCENT}
    made = make_train_step(MODEL, DIS, own, vocab_chunk=4, experts=experts)
    return jax.jit(made, compiler_options=QUICK)


def run(own: Batch, experts: Experts = OWN_CHOICES) -> tuple[TrainState, StepReport]:
    return jax.block_until_ready(step(experts)(start(DIS, DESCENT, WEIGHTS), own))


def load() -> np.ndarray:
    """int[layers, experts] of all tokens of OWN."""
    chosen = choices(WEIGHTS, np.concatenate([t.tokens for t in OWN]))
    return np.stack([np.bincount(own.ravel(), minlength=EXPERTS) for own in chosen.swapaxes(0, 1)])


def test_load_by_hand() -> None:
    said = numbers(run(batch())[1].metrics)
    want = load()
    assert said[names.ROUTER_LARGEST_LOAD] == pytest.approx(want.max() / want.mean())
    assert said[names.ROUTER_UNUSED_SHARE] == pytest.approx((want == 0).mean())


def test_differing_choices_by_hand() -> None:
    """Half of each token's recorded choices are another expert than the router's."""

    def other(tokens: np.ndarray) -> np.ndarray:
        own = choices(WEIGHTS, tokens).copy()
        missing = [[next(e for e in range(EXPERTS) if e not in c) for c in row] for row in own]
        own[..., 0] = missing
        return own[..., ::-1]  # the order says nothing

    def same(tokens: np.ndarray) -> np.ndarray:
        return choices(WEIGHTS, tokens)[..., ::-1]

    def told(given: Any) -> float:
        return numbers(run(batch(given=given))[1].metrics)[names.ROUTER_DIFFERING_SHARE]

    assert told(other) == 0.5
    assert told(same) == 0.0


def test_replay_trains_the_experts_that_sampled() -> None:
    """Experts 0 and 1 everywhere: only they get a gradient, and the load stays the router's own."""
    fixed = batch(given=lambda tokens: np.broadcast_to([0, 1], (len(tokens), LAYERS, CHOSEN)))
    state, report = run(fixed, Experts(replay=True))
    moved = np.abs(np.asarray(state.params["policy"]["experts"] - WEIGHTS["experts"])).max(-1)
    assert (moved[:, :2] > 0).all() and (moved[:, 2:] == 0).all()
    want = load()
    said = numbers(report.metrics)[names.ROUTER_LARGEST_LOAD]
    assert said == pytest.approx(want.max() / want.mean())


def test_without_replay_and_where_nothing_is_recorded_the_router_chooses() -> None:
    fixed = batch(given=lambda tokens: np.broadcast_to([0, 1], (len(tokens), LAYERS, CHOSEN)))
    plain = run(batch())[0].params["policy"]
    for own, experts in ((fixed, Experts()), (batch(), Experts(replay=True))):
        got = run(own, experts)[0].params["policy"]
        for name in plain:
            np.testing.assert_array_equal(got[name], plain[name])


@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 4, 128)])
def test_the_bias_moves_towards_an_even_load(shape: Shape) -> None:
    state, _ = run(batch(shape), Experts(bias_rate=0.01))
    own = load()
    want = 0.01 * np.sign(own.mean(-1, keepdims=True) - own)
    np.testing.assert_allclose(state.params["policy"]["bias"], want, rtol=1e-6)
    assert not np.asarray(run(batch(shape))[0].params["policy"]["bias"]).any()


def test_a_held_policy_keeps_its_bias() -> None:
    """As during a critic's warm-up."""
    held = DESCENT._replace(learning_rate=lambda step: jnp.where(step > 0, 0.1, 0.0))
    made = make_train_step(
        MODEL, DIS, {"policy": held}, vocab_chunk=4, experts=Experts(bias_rate=0.01)
    )
    one, _ = jax.jit(made)(start(DIS, held, WEIGHTS), batch())
    assert int(one.step) == 1 and not np.asarray(one.params["policy"]["bias"]).any()
    two, _ = jax.jit(made)(one, batch())
    assert np.asarray(two.params["policy"]["bias"]).any()


def test_a_step_that_is_not_applied_moves_no_bias() -> None:
    poisoned = batch()
    poisoned.behavior[poisoned.mask] = np.nan
    state, report = run(poisoned, Experts(bias_rate=0.01))
    assert not np.isfinite(report.loss)
    assert not np.asarray(state.params["policy"]["bias"]).any()
