"""Weights of a batch: by hand, what they sum to, and that copies and failures move nothing."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_jax.losses.reductions import (
    constant_norm,
    prompt_mean,
    rollout_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
)
from rl_jax.losses.types import Reduction
from rl_jax.trajectories.types import NOT_SAMPLED, Trajectory, copy_of
from tests.trajectories.build import steady, trajectory

few = settings(steady, max_examples=30)


def tokens(count: int, *, sample: int = 0, prompt: int = 0) -> Trajectory:
    """A trajectory of `count` sampled tokens, each behind one that is not."""
    return trajectory(sample, 1.0, (0, NOT_SAMPLED) * count, prompt=prompt)


# Prompt 0: a rollout of two trajectories and one of a single one; prompt 1: one rollout.
BATCH = [tokens(1), tokens(3), tokens(2, sample=1), tokens(4, prompt=1)]


@pytest.mark.parametrize(
    ("reduction", "want"),
    [
        (token_mean, [1 / 10] * 4),
        (token_sum, [1.0] * 4),
        (sequence_mean_token_mean, [1 / 4, 1 / 12, 1 / 8, 1 / 16]),
        (sequence_mean_token_sum, [1 / 4] * 4),
        (constant_norm(5), [1 / 20] * 4),
        (prompt_mean, [1 / 12, 1 / 12, 1 / 12, 1 / 8]),
        (rollout_mean, [1 / 12, 1 / 12, 1 / 6, 1 / 12]),
    ],
)
def test_by_hand(reduction: Reduction, want: list[float]) -> None:
    for own, weights, each in zip(BATCH, reduction(BATCH), want, strict=True):
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, own.loss_mask * each, rtol=1e-6)


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum": sequence_mean_token_sum,
    "constant_norm": constant_norm(7),
    "prompt_mean": prompt_mean,
    "rollout_mean": rollout_mean,
}
every = pytest.mark.parametrize("name", REDUCTIONS)

BATCHES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=7
).filter(lambda batch: any(count for _, _, count in batch))
"""(prompt, sample, sampled tokens) of each trajectory; equal ones happen, and are no copies."""


def members(batch: list[tuple[int, int, int]]) -> list[Trajectory]:
    return [tokens(count, sample=sample, prompt=prompt) for prompt, sample, count in batch]


def mean_by(unit: Callable) -> Callable:
    """The mean over units of the mean over a unit's terms, from the definition."""

    def reduced(batch: list, terms: list[np.ndarray]) -> float:
        pairs = sorted(zip(map(unit, enumerate(batch)), range(len(batch)), strict=True))
        units = [
            np.concatenate([terms[i] for _, i in own])
            for _, own in groupby(pairs, key=lambda pair: pair[0])
        ]
        return float(np.mean([own.mean() for own in units if own.size]))

    return reduced


def per_sequence(scale: float) -> Callable:
    return lambda batch, terms: scale * np.mean([own.sum() for own in terms if own.size])


DEFINITIONS = {
    "token_mean": mean_by(lambda item: 0),
    "token_sum": lambda batch, terms: sum(own.sum() for own in terms),
    "sequence_mean_token_mean": mean_by(lambda item: item[0]),
    "sequence_mean_token_sum": per_sequence(1.0),
    "constant_norm": per_sequence(1 / 7),
    "prompt_mean": mean_by(lambda item: item[1][0]),
    "rollout_mean": mean_by(lambda item: item[1][:2]),
}


def total(own: list[Trajectory], weights: list[np.ndarray], terms: list[np.ndarray]) -> float:
    """sum of weight x term, terms given for the sampled tokens."""
    each = zip(own, weights, terms, strict=True)
    return float(sum((w[t.loss_mask].astype(np.float64) * x).sum() for t, w, x in each))


@every
@few
@given(batch=BATCHES)
def test_it_is_the_mean_it_is_called(name: str, batch: list) -> None:
    own = members(batch)
    terms = [np.random.default_rng([i, 3]).normal(size=n) for i, (_, _, n) in enumerate(batch)]
    got = total(own, REDUCTIONS[name](own), terms)
    assert got == pytest.approx(DEFINITIONS[name](batch, terms), rel=1e-5, abs=1e-6)


@every
@few
@given(batch=BATCHES)
def test_weights_sum_to_what_they_must(name: str, batch: list) -> None:
    own = members(batch)
    counts = [int(t.loss_mask.sum()) for t in own]
    mean_count = sum(counts) / sum(map(bool, counts))
    want = {
        "token_sum": sum(counts),
        "sequence_mean_token_sum": mean_count,
        "constant_norm": mean_count / 7,
    }
    weights = REDUCTIONS[name](own)
    assert not any(w[~t.loss_mask].any() for t, w in zip(own, weights, strict=True))
    got = sum(float(w.sum(dtype=np.float64)) for w in weights)
    assert got == pytest.approx(want.get(name, 1.0), rel=1e-6)


@every
@few
@given(batch=BATCHES, data=st.data())
def test_a_copy_shares_the_weight_of_its_original(
    name: str, batch: list, data: st.DataObject
) -> None:
    assume(len(set(batch)) == len(batch))
    own = members(batch)
    which = data.draw(st.integers(0, len(own) - 1))
    times = data.draw(st.integers(1, 3))
    alone = REDUCTIONS[name](own)
    padded = REDUCTIONS[name]([*own, *[copy_of(own[which])] * times])
    for index, weights in enumerate(alone):
        together = padded[index] * np.float32(1 + times if index == which else 1)
        np.testing.assert_allclose(together, weights, rtol=1e-6)
    for copied in padded[len(own) :]:
        np.testing.assert_array_equal(copied, padded[which])


@every
def test_copies_of_a_fan_out_share_with_their_own_originals(name: str) -> None:
    """Both trajectories of a rollout are copied, one of them twice."""
    first, second = tokens(1), tokens(3)
    rest = [tokens(2, sample=1)]
    alone = REDUCTIONS[name]([first, second, *rest])
    copies = [copy_of(first), copy_of(second), copy_of(second)]
    padded = REDUCTIONS[name]([first, second, *rest, *copies])
    for got, want, times in zip(padded[:3], alone, [2, 3, 1], strict=True):
        np.testing.assert_allclose(got * np.float32(times), want, rtol=1e-6)


@every
def test_equal_trajectories_of_a_fan_out_are_no_copies(name: str) -> None:
    """Like two different ones; and a copy shares with both."""
    twin = REDUCTIONS[name]([tokens(2), tokens(2)])
    different = REDUCTIONS[name]([tokens(2), trajectory(0, 1.0, (0, NOT_SAMPLED, 0))])
    for a, b in zip(twin, different, strict=True):
        np.testing.assert_array_equal(a[a > 0], b[b > 0])
    padded = REDUCTIONS[name]([tokens(2), tokens(2), copy_of(tokens(2))])
    for weights in padded:
        np.testing.assert_allclose(weights * np.float32(3), twin[0] * np.float32(2), rtol=1e-6)


@every
@few
@given(batch=BATCHES, at=st.integers(0, 7), count=st.integers(0, 3))
def test_failed_and_unsampled_trajectories_weigh_and_count_nothing(
    name: str, batch: list, at: int, count: int
) -> None:
    own = members(batch)
    alone = REDUCTIONS[name](own)
    for nothing in (trajectory(9, None, (0,) * count), trajectory(0, 1.0, (NOT_SAMPLED,) * count)):
        got = REDUCTIONS[name]([*own[:at], nothing, *own[at:]])
        assert not got.pop(min(at, len(own))).any()
        for a, b in zip(got, alone, strict=True):
            np.testing.assert_array_equal(a, b)


@every
@few
@given(batch=BATCHES, data=st.data())
def test_weights_follow_the_order_of_the_batch(name: str, batch: list, data: st.DataObject) -> None:
    own = members(batch)
    order = data.draw(st.permutations(range(len(own))))
    plain = REDUCTIONS[name](own)
    for i, weights in zip(order, REDUCTIONS[name]([own[i] for i in order]), strict=True):
        np.testing.assert_array_equal(weights, plain[i])


@every
@pytest.mark.parametrize(
    "batch",
    [[], [trajectory(0, 1.0, ()), trajectory(1, 1.0, (NOT_SAMPLED,))], [trajectory(0, None, (0,))]],
)
def test_a_batch_in_which_nothing_weighs_is_named(name: str, batch: list[Trajectory]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .*loss_mask"):
        REDUCTIONS[name](batch)


def test_the_same_sample_of_another_prompt_or_task_is_another_rollout() -> None:
    own = tokens(1)
    other = replace(tokens(3), key=own.key._replace(task="another"))
    for reduction in (rollout_mean, prompt_mean):
        sums = [float(w.sum()) for w in reduction([own, tokens(3, prompt=1), other])]
        assert sums == pytest.approx([1 / 3] * 3)
    copy = copy_of(tokens(1, prompt=1))
    assert [w.sum() for w in token_sum([own, copy])] == [1.0, 1.0]


def test_a_retry_is_the_same_rollout() -> None:
    again = trajectory(0, 1.0, (0, 0, 0), attempt=1)
    sums = [float(w.sum()) for w in rollout_mean([tokens(1), again, tokens(1, sample=1)])]
    assert sums == pytest.approx([1 / 8, 3 / 8, 1 / 2])


@pytest.mark.parametrize("length", [0, -3])
def test_constant_norm_needs_a_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"constant_norm: length must be .* got {length}"):
        constant_norm(length)
