"""What happens to one trajectory moves no other's advantage; every estimator, whole batches."""

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.trajectories.types import Group
from tests.advantages.build import BATCHES, EVERY, Known, computed, copied, known, last, members
from tests.trajectories.build import group, steady, trajectory

few = settings(steady, max_examples=25)
"""Each example is a batch that every estimator is asked about."""


def agree(name: str, got: list, want: list) -> None:
    for got_group, want_group in zip(got, want, strict=True):
        for got_member, want_member in zip(got_group, want_group, strict=True):
            np.testing.assert_allclose(got_member, want_member, rtol=1e-5, atol=1e-5, err_msg=name)


@few
@given(batch=BATCHES, data=st.data())
def test_a_copy_takes_its_originals_values_and_moves_nothing(
    batch: list, data: st.DataObject
) -> None:
    own = members(batch)
    number = data.draw(st.integers(0, len(own) - 1))
    valid = [i for i, k in enumerate(own[number]) if k.trajectory.valid]
    which = data.draw(st.lists(st.sampled_from(valid), max_size=4)) if valid else []
    padded = list(own)
    padded[number] = [*own[number], *(copied(own[number][i]) for i in which)]
    for name, advantage in EVERY.items():
        got = computed(advantage, padded)
        for i, pair in zip(which, got[number][len(own[number]) :], strict=True):
            np.testing.assert_array_equal(pair, got[number][i], err_msg=name)
        got[number] = got[number][: len(own[number])]
        agree(name, got, computed(advantage, own))


@few
@given(batch=BATCHES, data=st.data())
def test_a_failed_trajectory_gets_zeros_and_moves_nothing(batch: list, data: st.DataObject) -> None:
    own = members(batch)
    number = data.draw(st.integers(0, len(own) - 1))
    broken = known(trajectory(data.draw(st.integers(0, 5)), None, (0, 1), prompt=number), 7)
    at = data.draw(st.integers(0, len(own[number])))
    with_it = list(own)
    with_it[number] = [*own[number][:at], broken, *own[number][at:]]
    for name, advantage in EVERY.items():
        got = computed(advantage, with_it)
        assert not np.any(got[number].pop(at)), name
        agree(name, got, computed(advantage, own))


@few
@given(batch=BATCHES, data=st.data())
def test_the_order_of_members_and_groups_moves_nothing(batch: list, data: st.DataObject) -> None:
    own = members(batch)
    orders = [data.draw(st.permutations(range(len(group)))) for group in own]
    groups = data.draw(st.permutations(range(len(own))))
    permuted = [[own[g][i] for i in orders[g]] for g in groups]
    for name, advantage in EVERY.items():
        plain = computed(advantage, own)
        got = computed(advantage, permuted)
        agree(name, got, [[plain[g][i] for i in orders[g]] for g in groups])


@few
@given(batch=BATCHES)
def test_tokens_that_were_not_sampled_get_zeros_and_move_nothing(batch: list) -> None:
    own = members(batch)
    spoilt = [[_spoilt(k) for k in group] for group in own]
    for name, advantage in EVERY.items():
        plain = computed(advantage, own)
        for k, pair in zip(chain(*own), chain(*plain), strict=True):
            assert not np.any(np.stack(pair)[:, ~k.trajectory.loss_mask]), name
        for got, want in zip(chain(*computed(advantage, spoilt)), chain(*plain), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)


def _spoilt(own: Known) -> Known:
    mask = own.trajectory.loss_mask
    nan = np.float32(np.nan)
    return own._replace(
        values=np.where(mask, own.values, nan), log_ratios=np.where(mask, own.log_ratios, nan)
    )


WHOLE = ("group_mean", "standardised", "leave_one_out", "max_rl", "single", "batch_standardised")
"""Give every token of a rollout the same advantage."""
LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@few
@given(batch=st.lists(st.tuples(st.integers(0, 8).map(float), LENGTHS), min_size=1, max_size=5))
def test_a_fan_out_moves_no_rollouts_advantage(batch: list[tuple[float, list[int]]]) -> None:
    alone = group(rewards=tuple(reward for reward, _ in batch))
    fanned = tuple(
        trajectory(sample, reward, (0,) * length)
        for sample, (reward, lengths) in enumerate(batch)
        for length in lengths
    )
    for name in WHOLE:
        plain = last(EVERY[name], alone)[0]
        got = last(EVERY[name], Group("lookup", 0, fanned))[0]
        want = [plain[m.key.sample] for m in fanned]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
