"""Packed arrays of a batch: each number where its token is, nothing elsewhere."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import task_id
from rl_jax.trainer.batches import (
    Batch,
    Shape,
    batch_shape,
    build_batch,
    cut,
    empty_batch,
    locate,
    spread,
    with_advantages,
)
from rl_jax.trajectories.packing import pack
from rl_jax.trajectories.types import Trajectory
from tests.trainer.build import random_trajectories, trajectory_of
from tests.trajectories.build import steady

SHAPE = Shape(microbatches=3, rows=2, row_length=128)


def built(own: list[Trajectory], published: int = 0) -> tuple[Batch, float]:
    """With `ramps` for advantages and their negatives for returns."""
    batch, places, padding = build_batch(own, token_mean, published, SHAPE)
    returns = [-ramp for ramp in ramps(own)]
    return with_advantages(batch, places, ramps(own), returns), padding


def ramps(trajectories: list[Trajectory]) -> list[np.ndarray]:
    """Advantages that tell every token from every other."""
    return [np.float32(100 * i + np.arange(len(t.tokens))) for i, t in enumerate(trajectories)]


def test_by_hand() -> None:
    own = [
        trajectory_of([5, 6, 7], [False, True, False], version=3, behavior=-0.5, temperature=0.7),
        trajectory_of([8] * 70, version=1, sample=1),
        trajectory_of([9, 9], sample=2, version=4),
    ]
    own[2] = replace(own[2], key=own[2].key._replace(task="b"))
    batch, padding = built(own, 4)
    # The longest comes first and takes two chunks: row 0. The others share row 1.
    assert batch.count == 1
    assert batch.segment_ids[0, 0, [0, 69, 70, 127]].tolist() == [1, 1, -1, -1]
    assert batch.segment_ids[0, 1, [0, 2, 3, 63, 64, 65, 66]].tolist() == [0, 0, -1, -1, 2, 2, -1]
    row = [array[0, 1] for array in batch[:-2]]
    tokens, positions, _, mask, behavior, advantages, returns, weights, temperature, lag, tasks = (
        row
    )
    assert tokens[[0, 1, 2, 3, 64, 65]].tolist() == [5, 6, 7, 0, 9, 9]
    assert positions[[0, 1, 2, 3, 64, 65]].tolist() == [0, 1, 2, 0, 0, 1]
    assert np.flatnonzero(mask).tolist() == [1, 65]
    assert behavior[[0, 1, 65]].tolist() == [0.0, -0.5, -1.0]
    assert advantages[[0, 1, 2, 3, 65]].tolist() == [0, 1, 2, 0, 201]
    assert returns[[0, 1, 2, 3, 65]].tolist() == [0, -1, -2, 0, -201]
    assert tasks[[0, 2, 3, 65]].tolist() == [task_id("lookup"), task_id("lookup"), 0, task_id("b")]
    np.testing.assert_allclose(weights[[0, 1, 65]], [0, 1 / 71, 1 / 71])
    assert temperature[[2, 3, 64]].tolist() == [np.float32(0.7), 1.0, 1.0]
    assert lag[[0, 1, 65]].tolist() == [0, 1, 0]
    assert batch.lag[0, 0, [0, 1, 69]].tolist() == [0, 3, 3]
    assert padding == pytest.approx(1 - 75 / 256)
    assert (batch.segment_ids[1:] == -1).all()
    assert not batch.weights[1:].any()


@steady
@given(st.lists(st.integers(9, 128), min_size=1, max_size=6), st.integers(0, 9))
def test_every_trajectory_lies_whole_at_its_place(lengths: list[int], seed: int) -> None:
    own = random_trajectories(lengths, seed=seed)
    batch, padding = built(own, 2)
    weights = token_mean(own)
    flat = [array.reshape(-1, 128) for array in batch[:-2]]
    for number, (t, place) in enumerate(zip(own, pack(lengths, 128), strict=True)):
        tokens, positions, segments, mask, behavior, advantages, returns, *rest = (
            array[place.row, place.start : place.start + len(t.tokens)] for array in flat
        )
        weight, temperature, lag, tasks = rest
        assert (tokens == t.tokens).all()
        assert (positions == np.arange(len(t.tokens))).all()
        assert (segments == number).all()
        assert (mask == t.loss_mask).all()
        assert (behavior == t.behavior_logprobs).all()
        assert (advantages == ramps(own)[number]).all()
        assert (returns == -ramps(own)[number]).all()
        assert (tasks == task_id("lookup")).all()
        assert (weight == weights[number]).all()
        assert (temperature == t.temperature).all()
        assert (lag == np.where(t.loss_mask, 2 - t.versions, 0)).all()
    outside = batch.segment_ids == -1
    assert (~outside).sum() == sum(lengths)
    nothing = empty_batch(SHAPE)
    assert all((a[outside] == b[outside]).all() for a, b in zip(batch[:-2], nothing, strict=False))
    used = 1 + max(p.row for p in pack(lengths, 128))
    assert batch.count == -(-used // 2)
    assert padding == pytest.approx(1 - sum(lengths) / (int(batch.count) * 256))


@pytest.mark.parametrize(
    "name", [n for n in empty_batch(SHAPE)._fields if n not in ("count", "choices")]
)
def test_the_shape_and_the_types_do_not_depend_on_the_data(name: str) -> None:
    own = random_trajectories([100, 3])
    full, _ = built(own)
    empty = empty_batch(SHAPE)
    assert getattr(full, name).shape == getattr(empty, name).shape == SHAPE
    assert getattr(full, name).dtype == getattr(empty, name).dtype
    assert full.count.dtype == empty.count.dtype == np.int32


def test_locate_names_the_trajectory() -> None:
    own = random_trajectories([100, 3, 90])
    batch, _ = built(own)
    assert locate(batch, 0, 0, 99) == 0
    assert locate(batch, 0, 0, 100) == -1
    assert locate(batch, 0, 1, 0) == 2
    assert locate(batch, 1, 0, 0) == 1


def test_too_many_rows() -> None:
    own = random_trajectories([128] * 7)
    with pytest.raises(ValueError, match="7 rows exceed 3 microbatches of 2"):
        build_batch(own, token_mean, 0, SHAPE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w[:1], "1 arrays for 2 trajectories"),
        (lambda w: [w[0], w[1][:-1]], r"float32\[4\] for .*sample=1.*, needs float32\[5\]"),
        (lambda w: [w[0].astype(float), w[1]], r"float64\[5\] for .*sample=0.*, needs float32"),
        (lambda w: [w[0], None], r"object\[\] for .*sample=1.*, needs float32\[5\]"),
    ],
)
def test_a_reduction_that_does_not_fit(change: Callable, said: str) -> None:
    def mine(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return change(token_mean(trajectories))

    with pytest.raises(ValueError, match=rf"^test_a_reduction_that_does_not_fit: {said}"):
        build_batch(random_trajectories([5, 5]), mine, 0, SHAPE)


def test_a_trajectory_longer_than_a_row() -> None:
    own = random_trajectories([129])
    with pytest.raises(ValueError, match="a trajectory of 129 tokens exceeds a row of 128"):
        build_batch(own, token_mean, 0, SHAPE)


def test_advantages_belong_to_trajectories_one_each() -> None:
    own = random_trajectories([5, 5])
    batch, places, _ = build_batch(own, token_mean, 0, SHAPE)
    with pytest.raises(ValueError, match="shorter"):
        with_advantages(batch, places, ramps(own)[:1], ramps(own))
    with pytest.raises(ValueError, match="longer"):
        with_advantages(batch, places, ramps(own), [*ramps(own), ramps(own)[0]])


@steady
@given(st.lists(st.integers(9, 128), min_size=1, max_size=6))
def test_cut_is_what_spread_was_given(lengths: list[int]) -> None:
    own = random_trajectories(lengths)
    batch, places, _ = build_batch(own, token_mean, 0, SHAPE)
    whole = spread(batch, places, ramps(own))
    assert not whole[batch.segment_ids == -1].any()
    for got, want in zip(cut(whole, places, own), ramps(own), strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_recorded_log_probability_that_is_not_finite_is_named(value: float) -> None:
    good, bad = random_trajectories([5]), trajectory_of([1, 2, 3, 4], sample=7)
    bad.behavior_logprobs[0] = np.nan  # not sampled: nobody reads it
    build_batch([*good, bad], token_mean, 0, SHAPE)
    bad.behavior_logprobs[2] = value
    said = re.escape(f"behavior_logprobs of {bad.key} is {value} at token 2")
    with pytest.raises(ValueError, match=f"^{said}$"):
        build_batch([*good, bad], token_mean, 0, SHAPE)


@steady
@given(st.data())
def test_a_planned_shape_holds_whatever_comes(data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, 300))
    row = data.draw(st.sampled_from([320, 384, 640]))
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=24))
    shape = batch_shape(len(lengths), longest, rows=2, row_length=row)
    rows = 1 + max(p.row for p in pack(lengths, row))
    assert rows <= shape.microbatches * shape.rows


def test_planned_shapes_by_hand() -> None:
    assert batch_shape(128, 128, rows=16, row_length=256) == Shape(4, 16, 256)
    assert batch_shape(129, 128, rows=16, row_length=256) == Shape(5, 16, 256)
    assert batch_shape(10, 65, rows=4, row_length=192) == Shape(3, 4, 192)


def test_rows_that_no_trajectory_fits() -> None:
    with pytest.raises(ValueError, match="rows of 64 tokens cannot hold trajectories of 65"):
        batch_shape(1, 65, rows=1, row_length=64)


def test_recorded_choices_lie_at_their_tokens_and_nowhere_else() -> None:
    """The second trajectory's last two tokens have none, the third has none at all."""
    own = random_trajectories([70, 5, 3])
    marks = [np.arange(n * 4, dtype=np.uint16).reshape(n, 2, 2) for n in (70, 3)]
    own[:2] = [replace(t, choices=c) for t, c in zip(own, marks, strict=False)]
    batch, places, _ = build_batch(own, token_mean, 0, SHAPE, (2, 2))
    assert batch.choices is not None and batch.choices.dtype == np.int16
    for place, recorded in zip(places, marks, strict=False):
        row = batch.choices.reshape(-1, SHAPE.row_length, 2, 2)[place.row]
        np.testing.assert_array_equal(row[place.start :][: len(recorded)], recorded)
    assert (batch.choices >= 0).sum() == (70 + 3) * 4
    assert build_batch(own, token_mean, 0, SHAPE).batch.choices is None
    with pytest.raises(ValueError, match=r"choices of .*: \[2, 2\] experts of a token, .*\[3, 2"):
        build_batch(own, token_mean, 0, SHAPE, (3, 2))
