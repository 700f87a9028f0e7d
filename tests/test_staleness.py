"""Lag and the policies; what the queue makes of them is tested in tests/queues/."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.staleness import Drop, Take, Wait, drop_stale, lag, take_all, wait_for_stragglers
from rl_jax.trajectories.types import Group
from tests.trajectories.build import group, steady, trajectory


def test_lag_counts_from_the_oldest_sampled_token_of_the_group() -> None:
    g = Group("lookup", 0, (trajectory(0, 1.0, (5, 6)), trajectory(1, 0.0, (7, 3, 9))))
    assert lag(g, 9) == 6
    assert lag(g, 3) == 0


def test_a_group_that_sampled_nothing_has_no_lag() -> None:
    assert lag(Group("lookup", 0, (trajectory(0, 1.0, ()),)), 9) == 0


@pytest.mark.parametrize(
    ("published", "decision"),
    [
        (4, Take()),
        (5, Take()),
        (6, Take()),
        (7, Drop("lag 3 above 2")),
        (99, Drop("lag 95 above 2")),
    ],
)
def test_drop_stale(published: int, decision: object) -> None:
    assert drop_stale(2)(group(version=4), published) == decision


@pytest.mark.parametrize("published", [4, 99])
def test_take_all_leaves_it_to_the_loss(published: int) -> None:
    assert take_all(group(version=4), published) == Take()


@pytest.mark.parametrize("tau", [0, -1])
def test_tau_below_one_is_refused(tau: int) -> None:
    with pytest.raises(ValueError, match=f"tau is {tau}"):
        drop_stale(tau)
    with pytest.raises(ValueError, match=f"tau is {tau}"):
        wait_for_stragglers(tau, lambda: (), 1.0)


@pytest.mark.parametrize("patience", [0.0, -1.0, float("inf"), float("nan")])
def test_patience_ends(patience: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        wait_for_stragglers(1, lambda: (), patience)


@pytest.mark.parametrize(
    ("in_flight", "version", "decision"),
    [
        ((), 10, Take()),
        ((9,), 10, Take()),
        ((8,), 10, Wait(30.0, Take())),
        ((8,), 9, Wait(30.0, Take())),
        ((8,), 8, Take()),
        ((8,), 7, Drop("lag 3 above 2")),
        ((7,), 10, Take()),
        ((7, 8), 10, Wait(30.0, Take())),
    ],
    ids=["none", "in time", "edge", "edge, lag 1", "as old", "too old", "lost", "lost and edge"],
)
def test_wait_for_stragglers_at_version_10_and_tau_2(
    in_flight: tuple[int, ...], version: int, decision: object
) -> None:
    assert wait_for_stragglers(2, lambda: in_flight, 30.0)(group(version=version), 10) == decision


@steady
@given(
    tau=st.integers(1, 5),
    versions=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    published=st.integers(0, 30),
    in_flight=st.lists(st.integers(0, 30), max_size=3),
)
def test_no_policy_takes_a_lag_above_tau(
    tau: int, versions: list[int], published: int, in_flight: list[int]
) -> None:
    g = Group("lookup", 0, (trajectory(0, 1.0, tuple(versions)),))
    behind = published - int(np.min(versions))
    for admit in (drop_stale(tau), wait_for_stragglers(tau, lambda: in_flight, 1.0)):
        match admit(g, published):
            case Take() | Wait(_, Take()):
                assert behind <= tau
            case Drop():
                assert behind > tau
