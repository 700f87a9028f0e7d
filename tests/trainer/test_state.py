"""The optimizer against Adam in numpy: clipping, warm-up, and resets at pushes."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest

from rl_jax.losses.recipes import supervised
from rl_jax.losses.reductions import token_mean
from rl_jax.trainer.batches import Shape
from rl_jax.trainer.state import Optimizer, TrainState, adam, after_push
from tests.fakes.bigram import cross_entropy_gradient, table
from tests.trainer.build import VOCAB, batch_of, bigram_step, random_trajectories, start

LOSS = supervised()
SHAPE = Shape(1, 2, 64)
RATE, WARMUP, B1, B2, EPS, DECAY, CLIP = 0.05, 10, 0.8, 0.9, 1e-3, 0.1, 0.15
PUSH_EVERY = 4
UPDATES = 3 * PUSH_EVERY + 2  # three pushes, and the second update after the third


class Trace(NamedTuple):
    before: np.ndarray
    after: np.ndarray
    gradient: np.ndarray
    """At `before`, by hand."""
    state: TrainState
    """After the update, before any reset."""


def optimizer(*, reset_at_push: bool = True) -> Optimizer:
    return adam(
        RATE,
        warmup_steps=WARMUP,
        b1=B1,
        b2=B2,
        eps=EPS,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        reset_at_push=reset_at_push,
    )


@cache
def trace(resets: bool) -> tuple[Trace, ...]:
    """Real steps, a reset after every fourth, each with other demonstrations."""
    return tuple(_trace(optimizer(reset_at_push=resets)))


def _trace(own: Optimizer) -> Iterator[Trace]:
    step, state = bigram_step(LOSS, own), start(LOSS, own)
    for update in range(1, UPDATES + 1):
        demonstrations = random_trajectories([40, 30], seed=update)
        weights = token_mean(demonstrations)
        before = np.asarray(state.params["policy"]["table"])
        gradient = sum(
            cross_entropy_gradient(before, t.tokens, w)
            for t, w in zip(demonstrations, weights, strict=True)
        )
        state, _ = step(state, batch_of(demonstrations, SHAPE, LOSS))
        yield Trace(before, np.asarray(state.params["policy"]["table"]), gradient, state)
        if update % PUSH_EVERY == 0:
            state = after_push(state, {"policy": own})


class HandAdam:
    """Kingma and Ba's algorithm 1 with decoupled decay, in float64, from zero moments."""

    def __init__(self) -> None:
        self.m, self.v, self.t = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB)), 0

    def step(self, params: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
        gradient = gradient * min(1.0, CLIP / np.linalg.norm(gradient))
        self.t += 1
        self.m = B1 * self.m + (1 - B1) * gradient
        self.v = B2 * self.v + (1 - B2) * gradient**2
        m, v = self.m / (1 - B1**self.t), self.v / (1 - B2**self.t)
        return params - rate * (m / (np.sqrt(v) + EPS) + DECAY * params)


def rate_of(update: int) -> float:
    """By the update's number in the run, whatever was reset."""
    return RATE * min(1.0, update / WARMUP)


def test_the_cases_are_interesting() -> None:
    norms = [np.linalg.norm(t.gradient) for t in trace(True)]
    assert min(norms) < CLIP < max(norms)


@pytest.mark.parametrize("push", [0, 1, 2, 3])
def test_second_update_after_a_reset_is_adams_second_step(push: int) -> None:
    hand = HandAdam()
    for update in (PUSH_EVERY * push + 1, PUSH_EVERY * push + 2):
        got = trace(True)[update - 1]
        want = hand.step(got.before, got.gradient, rate_of(update))
        np.testing.assert_allclose(got.after, want, rtol=2e-5, atol=1e-6)


def test_the_schedule_is_continuous_across_three_pushes() -> None:
    """The rate, solved from every update; the moments start anew four times."""
    rates = []
    for update, got in enumerate(trace(True), 1):
        if update % PUSH_EVERY == 1:
            hand = HandAdam()
        direction = hand.step(got.before, got.gradient, 1.0) - got.before
        moved = got.after - got.before
        rates.append(float((moved * direction).sum() / (direction**2).sum()))
    want = [RATE * min(1.0, n / 10) for n in range(1, UPDATES + 1)]
    np.testing.assert_allclose(rates, want, rtol=1e-4)
    assert [int(t.state.step) for t in trace(True)] == list(range(1, UPDATES + 1))


def test_without_resets_the_moments_go_on() -> None:
    hand = HandAdam()
    for update, got in enumerate(trace(False), 1):
        want = hand.step(got.before, got.gradient, rate_of(update))
        np.testing.assert_allclose(got.after, want, rtol=5e-5, atol=1e-6)
    first_after_push = trace(True)[PUSH_EVERY].after, trace(False)[PUSH_EVERY].after
    assert np.abs(first_after_push[0] - first_after_push[1]).max() > 1e-3


def bits(tree: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_reset_zeroes_moments_and_counts_and_nothing_else() -> None:
    own, state = optimizer(), trace(True)[1].state
    after = after_push(state, {"policy": own})
    assert bits(after.params) == bits(state.params)
    assert bits(after.step) == bits(state.step)
    assert bits(after.loss) == bits(state.loss)
    assert bits(after.optimizer) == bits(start(LOSS, own).optimizer) != bits(state.optimizer)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(after.optimizer))


def test_a_reset_that_is_switched_off_keeps_everything() -> None:
    state = trace(False)[1].state
    after = after_push(state, {"policy": optimizer(reset_at_push=False)})
    assert bits(after) == bits(state)


@pytest.mark.parametrize(
    ("warmup", "want"), [(0, [1.0, 1.0, 1.0]), (1, [1.0, 1.0, 1.0]), (4, [0.25, 0.5, 0.75])]
)
def test_linear_warm_up(warmup: int, want: list[float]) -> None:
    schedule: Callable = adam(2.0, warmup_steps=warmup).learning_rate
    got = [float(schedule(jax.numpy.int32(step))) for step in range(3)]
    assert got == [2.0 * w for w in want]


def test_rate_zero_changes_nothing() -> None:
    own = adam(0.0, weight_decay=1.0)
    batch = batch_of(random_trajectories([40]), SHAPE, LOSS)
    state, _ = bigram_step(LOSS, own)(start(LOSS, own), batch)
    assert bits(state.params) == bits({"policy": table(VOCAB)})
