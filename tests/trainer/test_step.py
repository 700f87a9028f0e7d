"""The train step against numpy: what it computes, whatever the split, and what it refuses."""

import re
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from rl_jax.arrays import Tree
from rl_jax.losses.combine import chain
from rl_jax.losses.recipes import dis, m2po, supervised
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, stateless
from rl_jax.metrics import names
from rl_jax.trainer.batches import Batch, Shape, empty_batch
from rl_jax.trainer.state import Optimizer, TrainState, adam
from rl_jax.trainer.step import StepReport, make_train_step
from rl_jax.trajectories.types import copy_of
from tests.fakes.bigram import bigram, cross_entropy_gradient, log_softmax, logprobs, table
from tests.losses.terms import numbers, running_count
from tests.trainer.build import (
    VOCAB,
    batch_of,
    bigram_step,
    descent,
    random_trajectories,
    start,
    trajectory_of,
)

SHAPE = Shape(microbatches=2, rows=2, row_length=128)
DIS, SUPERVISED, DESCENT, ADAM = dis(), supervised(), descent(), adam(1e-2)
TABLE = np.asarray(table(VOCAB)["table"])
LENGTHS = (100, 70, 64, 50, 30, 10)


def run(
    batch: Batch, loss: Loss = DIS, optimizer: Optimizer = DESCENT
) -> tuple[TrainState, StepReport]:
    """Returns when it is done: the device may read the batch's own memory until then."""
    return jax.block_until_ready(bigram_step(loss, optimizer)(start(loss, optimizer), batch))


def gradient(batch: Batch, loss: Loss = DIS) -> np.ndarray:
    return TABLE - np.asarray(run(batch, loss)[0].params["policy"]["table"])


def leaves(tree: Tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_supervised_step_by_hand() -> None:
    own = random_trajectories(LENGTHS)
    batch = batch_of(own, SHAPE, SUPERVISED)
    weights = token_mean(own)
    want = sum(
        cross_entropy_gradient(TABLE, t.tokens, w) for t, w in zip(own, weights, strict=True)
    )
    loss = -sum(float(w @ logprobs(TABLE, t.tokens)) for t, w in zip(own, weights, strict=True))
    state, report = run(batch, SUPERVISED)
    got = TABLE - np.asarray(state.params["policy"]["table"])
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert float(report.loss) == pytest.approx(loss, rel=1e-6)
    assert float(report.grad_norm) == pytest.approx(np.linalg.norm(want), rel=1e-5)
    assert numbers(report.metrics)["ce/nats"] == pytest.approx(loss, rel=1e-6)
    assert int(state.step) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_dis_step_by_hand(temperature: float) -> None:
    own = [
        trajectory_of(
            [1, 2, 3, 4], behavior=[0.0, -0.1, -2.0, -9.0], temperature=temperature, version=v
        )
        for v in (0, 1)
    ]
    current = logprobs(TABLE, own[0].tokens, temperature)[1:]
    ratio = np.exp(current - own[0].behavior_logprobs[1:])
    factor = np.where((ratio > 0.7) & (ratio < 6.0), ratio, 0.0)
    assert 0 < np.count_nonzero(factor) < 3
    want = np.zeros(TABLE.shape)
    for before, token, f in zip([1, 2, 3], [2, 3, 4], factor, strict=True):
        # Weight 1/6 each; advantages 2 and -1/2 add up to 3/2; logits are divided by temperature.
        pull = f * 1.5 / 6 / temperature
        want[before] += pull * np.exp(log_softmax(TABLE[before] / temperature))
        want[before, token] -= pull
    got = gradient(batch_of(own, SHAPE, DIS, [2.0, -0.5]))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_one_microbatch_or_many_give_the_same() -> None:
    own = random_trajectories(LENGTHS)
    advantages = [1.0, -1.0, 0.5, -0.5, 2.0, 0.0]
    results = [
        run(batch_of(own, Shape(m, r, 128), DIS, advantages), DIS, ADAM)
        for m, r in ((1, 4), (2, 2), (4, 1))
    ]
    whole, report = results[0]
    for state, other in results[1:]:
        assert float(other.loss) == pytest.approx(float(report.loss), rel=1e-6, abs=1e-7)
        np.testing.assert_allclose(
            state.params["policy"]["table"], whole.params["policy"]["table"], rtol=1e-6, atol=1e-7
        )
        assert numbers(other.metrics) == pytest.approx(numbers(report.metrics), rel=1e-5)


def test_a_copy_moves_nothing() -> None:
    own = random_trajectories([40, 30, 20])
    alone = batch_of(own, SHAPE, DIS, [1.0, -1.0, 0.5])
    padded = batch_of([*own, copy_of(own[1]), copy_of(own[1])], SHAPE, DIS, [1, -1, 0.5, -1, -1])
    np.testing.assert_allclose(gradient(padded), gradient(alone), rtol=1e-5, atol=1e-7)
    assert float(run(padded)[1].loss) == pytest.approx(float(run(alone)[1].loss), rel=1e-6)


def test_unused_microbatches_are_not_computed() -> None:
    batch = batch_of(random_trajectories([50, 40]), SHAPE, DIS)
    assert batch.count == 1
    clean = gradient(batch)
    for poisoned in (batch.weights, batch.behavior, batch.advantages):
        poisoned[1] = np.nan
    batch.mask[1] = True
    state, report = run(batch)
    np.testing.assert_array_equal(TABLE - np.asarray(state.params["policy"]["table"]), clean)
    assert np.isfinite(report.loss)
    assert (np.asarray(report.bad_column) == -1).all()
    # The poison works: computed, it is refused.
    assert not np.isfinite(run(batch._replace(count=np.array(2, np.int32)))[1].loss)


def test_an_empty_batch_changes_nothing_but_the_step() -> None:
    state, report = run(empty_batch(SHAPE))
    assert leaves(state.params) == [TABLE.tobytes()]
    assert float(report.loss) == float(report.grad_norm) == 0.0
    assert int(state.step) == 1


def test_all_tokens_out_of_band_change_nothing() -> None:
    own = [trajectory_of([1, 2, 3, 4], behavior=-30.0, sample=i) for i in range(2)]
    batch = batch_of(own, SHAPE, DIS, [1.0, -1.0])
    assert not gradient(batch).any()
    assert numbers(run(batch)[1].metrics)["two_sided_mask/above"] == 1.0


@pytest.mark.parametrize("where", ["behavior", "advantages", "weights"])
def test_a_step_that_is_not_finite_is_not_applied(where: str) -> None:
    batch = batch_of(random_trajectories(LENGTHS), SHAPE, DIS)
    warm, _ = run(batch, DIS, ADAM)
    assert batch.mask[1, 0, 5] or batch.mask[1, 0, 6]
    column = 5 if batch.mask[1, 0, 5] else 6
    getattr(batch, where)[1, 0, column] = np.nan
    state, report = bigram_step(DIS, ADAM)(warm, batch)
    assert leaves(state) == leaves(warm)
    assert int(state.step) == 1
    finite = {name: bool(ok) for name, ok in report.finite.items()}
    assert finite == {"policy.table": False}
    if where != "weights":  # from the host's reduction, no trajectory's own
        assert np.argwhere(report.bad_column >= 0).tolist() == [[1, 0]]
        assert int(report.bad_column[1, 0]) == column


def test_parameters_that_are_not_finite_name_the_first_row() -> None:
    broken = {"table": table(VOCAB)["table"].at[3, 3].set(np.nan)}
    own = [trajectory_of([1, 2, 1, 2]), trajectory_of([1, 2, 3, 4], sample=1)]
    batch = batch_of(own, SHAPE, DIS)
    _, report = bigram_step(DIS, DESCENT)(start(DIS, DESCENT, broken), batch)
    row, column = batch.segment_ids[0, 0, 0], int(report.bad_column[0, 0])
    # Both lie in row 0, the second from column 64 on; its token after the 3 is the first to be bad.
    assert row == 0
    assert column == 64 + 3


def test_metrics_of_microbatches_add_up() -> None:
    own = random_trajectories(LENGTHS, spread=2.0)
    _, report = run(batch_of(own, Shape(4, 1, 128), DIS))
    ratios = np.concatenate(
        [(logprobs(TABLE, t.tokens) - t.behavior_logprobs)[t.loss_mask] for t in own]
    )
    said = numbers(report.metrics)
    assert said["ratio/current_behavior/log_abs"] == pytest.approx(np.abs(ratios).mean(), rel=1e-5)
    assert said["two_sided_mask/below"] == pytest.approx((ratios <= np.log1p(-0.3)).mean())
    assert said["two_sided_mask/above"] == pytest.approx((ratios >= np.log(6)).mean())


SPLITS = [Shape(1, 8, 128), Shape(2, 4, 128), Shape(7, 1, 128)]


@pytest.mark.parametrize("shape", SPLITS)
def test_statistics_are_of_the_whole_batch(shape: Shape) -> None:
    own = random_trajectories(LENGTHS)
    loss = Loss(chain(running_count(), DIS.transform), token_mean)
    count = sum(int(t.loss_mask.sum()) for t in own)
    first = start(loss, DESCENT)
    state, report = bigram_step(loss, DESCENT)(first, batch_of(own, shape, loss))
    # Divides factors, which ratios then replace; what it saw is its state before the step.
    assert numbers(report.metrics)["seen"] == 10.0
    assert [float(s) for s in jax.tree.leaves(state.loss)] == [10.0 + count]


def test_what_hangs_on_statistics_is_the_same_for_every_split() -> None:
    """M2PO drops the tokens beyond a cut that the second moment of the whole batch decides."""
    own, loss = random_trajectories(LENGTHS, spread=1.0), m2po()
    advantages = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]
    results = [run(batch_of(own, shape, loss, advantages), loss) for shape in SPLITS]
    whole, report = results[0]
    assert 0.05 < numbers(report.metrics)[names.MASKED_SHARE] < 0.95
    for state, other in results[1:]:
        np.testing.assert_allclose(
            state.params["policy"]["table"], whole.params["policy"]["table"], rtol=1e-6, atol=1e-7
        )
        assert numbers(other.metrics) == pytest.approx(numbers(report.metrics), rel=1e-5)


@pytest.mark.parametrize(
    ("score", "tree"), [("value", "critic"), ("proximal", "proximal"), ("teacher(b)", "teacher(b)")]
)
def test_a_score_whose_tree_is_not_there(score: str, tree: str) -> None:
    def unchanged(scores, terms):
        return terms, {}

    greedy = Loss(stateless("greedy", unchanged, [score]), token_mean)
    said = re.escape(f"the loss needs the score {score!r}: no tree {tree!r} among policy")
    with pytest.raises(ValueError, match=said):
        run(batch_of(random_trajectories([5]), SHAPE, greedy), greedy)


def test_a_policy_gets_one_update_per_step() -> None:
    twice = DESCENT._replace(updates_per_step=2)
    with pytest.raises(ValueError, match="the policy gets one update per step, not 2"):
        make_train_step(bigram(VOCAB), DIS, {"policy": twice}, vocab_chunk=4)


def test_lag_reaches_the_transforms() -> None:
    def by_lag(scores, terms):
        return terms._replace(loss=scores.lag.astype(np.float32) * scores.mask), {}

    loss = Loss(stateless("by_lag", by_lag), token_mean)
    own: Sequence = [trajectory_of([1, 2], version=0), trajectory_of([1, 2], version=1, sample=1)]
    assert float(run(batch_of(own, SHAPE, loss, published=3), loss)[1].loss) == (3 + 2) / 2
