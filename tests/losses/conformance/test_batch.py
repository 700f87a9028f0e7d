"""Recipes with their own reductions, by hand; and the trainer's real step on three splits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax import losses
from rl_jax.arrays import Array
from rl_jax.losses import recipes
from rl_jax.losses.evaluate import evaluate, make_scores
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss
from rl_jax.trainer.batches import Shape
from rl_jax.trainer.step import make_train_step
from rl_jax.trajectories.types import Trajectory, copy_of
from tests.fakes.bigram import bigram, table
from tests.losses.conformance.programs import FAST_TO_COMPILE
from tests.trainer.build import (
    VOCAB,
    batch_of,
    descent,
    random_trajectories,
    start,
    trajectory_of,
)

GOOD = (1.1, 1.5)
BAD = (0.5, 1.0, 1.3)
"""Ratios of two trajectories, the first with an advantage of 1, the second of -1."""


def loss_and_gradient(
    loss: Loss, ratios: Sequence[Sequence[float]], copies: int = 0
) -> tuple[float, list[list[float]]]:
    """Of one row of four tokens per trajectory, its prompt token left out of the gradient.

    Every other policy gave every token the log-probability -2. The second trajectory comes with so
    many padding copies of itself, two at most; the gradients of all its rows are added up.
    """
    own = [trajectory_of(range(1 + len(r)), sample=i) for i, r in enumerate(ratios)]
    batch: list[Trajectory] = [*own, *[copy_of(own[1])] * copies]
    rows = [*ratios, *[ratios[1]] * copies]

    def padded(columns: Sequence[Sequence[float]]) -> np.ndarray:
        array = np.zeros((4, 4), np.float32)
        for row, column in enumerate(columns):
            array[row, : len(column)] = column
        return array

    weights = padded([w.tolist() for w in loss.reduction(batch)])
    scores = make_scores(
        padded([[0.0, *(np.log(r) - 2.0 for r in row)] for row in rows]),
        np.full_like(weights, -2.0),
        padded([t.loss_mask.tolist() for t in batch]) != 0,
        padded([[1.0 if i == 0 else -1.0] * (1 + len(row)) for i, row in enumerate(rows)]),
        others={name: np.full_like(weights, -2.0) for name in loss.transform.needs},
    )

    def value(current: Array) -> Array:
        terms, _ = evaluate(loss.transform, scores._replace(current=current))
        return jnp.sum(weights * terms.loss)

    total, gradient = jax.value_and_grad(value)(scores.current)
    rows_of = np.asarray(gradient)[:, 1:]
    second = rows_of[1:].sum(axis=0)
    return float(total), [
        rows_of[0, : len(ratios[0])].tolist(),
        second[: len(ratios[1])].tolist(),
    ]


SMALL = 1e-4
BY_HAND: dict[str, tuple[Loss, Sequence[Sequence[float]], float | None, Sequence]] = {
    # The mean over two sequences of the mean over their tokens.
    "grpo": (
        recipes.grpo(beta=0.0),
        (GOOD, BAD),
        -((1.1 + 1.2) / 2 - (0.8 + 1.0 + 1.3) / 3) / 2,
        ([-1.1 / 4, 0.0], [0.0, 1.0 / 6, 1.3 / 6]),
    ),
    "gspo": (
        recipes.gspo(),
        (np.exp([3 * SMALL, -SMALL]), np.exp([10 * SMALL, 20 * SMALL, 0.0])),
        -(np.exp(SMALL) - np.exp(10 * SMALL)) / 2,
        ([-np.exp(SMALL) / 4] * 2, [np.exp(10 * SMALL) / 6] * 3),
    ),
    "gspo, clipped": (
        recipes.gspo(),
        (np.exp([9 * SMALL, SMALL]), np.exp([-10 * SMALL, 0.0, 0.0])),
        -(1.0004 - 0.9997) / 2,
        ([0.0] * 2, [0.0] * 3),
    ),
    # Every token of the batch the same.
    "dapo": (
        recipes.dapo(),
        (GOOD, BAD),
        -((1.1 + 1.28) - (0.8 + 1.0 + 1.3)) / 5,
        ([-1.1 / 5, 0.0], [0.0, 1.0 / 5, 1.3 / 5]),
    ),
    "dual_clip": (
        recipes.dual_clip(),
        ((1.1, 0.5), (2.9, 3.1, 1.0)),
        -((1.1 + 0.5) - (2.9 + 3.0 + 1.0)) / 5,
        ([-1.1 / 5, -0.5 / 5], [2.9 / 5, 0.0, 1.0 / 5]),
    ),
    "cispo": (
        recipes.cispo(),
        (GOOD, BAD),
        None,
        ([-1.1 / 5, -1.2 / 5], [0.5 / 5, 1.0 / 5, 1.2 / 5]),
    ),
    "dis": (
        recipes.dis(),
        (GOOD, BAD),
        None,
        ([-1.1 / 5, -1.5 / 5], [0.0, 1.0 / 5, 1.3 / 5]),
    ),
    # Token sums over two trajectories x 10.
    "dr_grpo": (
        recipes.dr_grpo(length=10),
        (GOOD, BAD),
        -((1.1 + 1.2) - (0.8 + 1.0 + 1.3)) / 20,
        ([-1.1 / 20, 0.0], [0.0, 1.0 / 20, 1.3 / 20]),
    ),
    # (A - tau sum of log r)^2, each told once for a sequence: -2 tau (A - tau S) / 2 per token.
    "k1_5": (
        recipes.k1_5(tau=0.5),
        (np.exp([0.3, 0.1]), np.exp([0.2, -0.1, 0.3])),
        ((1 - 0.5 * 0.4) ** 2 + (-1 - 0.5 * 0.4) ** 2) / 2,
        ([-0.5 * (1 - 0.2)] * 2, [-0.5 * (-1 - 0.2)] * 3),
    ),
}


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("name", BY_HAND)
def test_loss_and_gradient_of_a_batch_by_hand(name: str, copies: int) -> None:
    loss, ratios, value, gradients = BY_HAND[name]
    got, slopes = loss_and_gradient(loss, ratios, copies)
    if value is not None:
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-7)
    for one, other in zip(slopes, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


# --- through the trainer's step ------------------------------------------------------------------


def of_everything() -> Loss:
    """Tokens one by one, as sequences, and, with a first pass, as a batch."""
    sequences = losses.chain(losses.ratio(level="geometric"), losses.clipped(0.2, 0.28))
    parts = losses.weighted_sum(
        tokens=(1.0, recipes.dis().transform),
        sequences=(0.5, sequences),
        batch=(0.5, recipes.m2po(0.1).transform),
    )
    return Loss(parts, token_mean)


DESCENT = descent()
SHAPES = {1: Shape(1, 7, 64), 2: Shape(2, 4, 64), 7: Shape(7, 1, 64)}


def test_the_step_does_not_see_the_split() -> None:
    loss = of_everything()
    own = random_trajectories((64, 60, 50, 45, 40, 38, 36), seed=1)
    advantages = [1.0, -1.0, 0.5, -2.0, 1.0, 1.5, -1.0]
    seen = {}
    made = make_train_step(bigram(VOCAB), loss, {"policy": DESCENT}, vocab_chunk=VOCAB)
    step = jax.jit(made, compiler_options=FAST_TO_COMPILE)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for count, shape in SHAPES.items():
            batch = batch_of(own, shape, loss, advantages)
            assert int(batch.count) == count
            seen[count] = jax.block_until_ready(step(start(loss, DESCENT), batch))
    state, report = seen[1]
    gradient = np.asarray(table(VOCAB)["table"]) - np.asarray(state.params["policy"]["table"])
    assert np.abs(gradient).max() > 1e-3
    for other, told in (seen[2], seen[7]):
        np.testing.assert_allclose(
            other.params["policy"]["table"], state.params["policy"]["table"], atol=1e-6
        )
        np.testing.assert_allclose(told.loss, report.loss, rtol=1e-5, atol=1e-7)
        for name, mean in report.metrics.items():
            np.testing.assert_allclose(told.metrics[name], mean, rtol=1e-4, atol=1e-4)
