"""Assembly: who is a member, who a copy, who a failure, and when there is no group."""

import pytest

from rl_jax.trajectories.groups import assemble
from tests.trajectories.build import trajectory


def rollouts(valid: list[int], failed: list[int]) -> list:
    broke = [trajectory(s, None, reason=f"tool died {s}") for s in failed]
    return broke + [trajectory(s, float(s)) for s in reversed(valid)]


def test_a_full_group_is_in_sample_order() -> None:
    group, reason = assemble("lookup", 0, rollouts([0, 1, 2, 3], []), 4)
    assert group is not None and reason == ""
    assert [(m.key.sample, m.copy_of) for m in group.members] == [
        (0, None),
        (1, None),
        (2, None),
        (3, None),
    ]
    assert group.failures == ()


def test_padding_goes_around_the_valid_ones() -> None:
    group, _ = assemble("lookup", 0, rollouts([1, 4, 5, 6, 8], [0, 2, 3, 7]), 9)
    assert group is not None
    assert [(m.key.sample, m.copy_of) for m in group.members] == [
        (1, None),
        (4, None),
        (5, None),
        (6, None),
        (8, None),
        (1, 1),
        (4, 4),
        (5, 5),
        (6, 6),
    ]
    assert group.failures == tuple((s, f"tool died {s}") for s in (0, 2, 3, 7))


def test_missing_rollouts_are_padded_like_failed_ones() -> None:
    group, _ = assemble("lookup", 0, rollouts([0, 1, 2], []), 4)
    assert group is not None
    assert [m.copy_of for m in group.members] == [None, None, None, 0]


@pytest.mark.parametrize(("valid", "kept"), [(5, True), (4, False), (0, False)])
def test_more_than_half_must_be_valid(valid: int, kept: bool) -> None:
    group, reason = assemble("lookup", 0, rollouts(list(range(valid)), list(range(valid, 8))), 8)
    assert (group is not None) is kept
    assert kept or reason.startswith(f"{valid} of 8 rollouts valid: tool died")


def test_an_even_half_is_not_enough_but_one_of_one_is() -> None:
    assert assemble("lookup", 0, rollouts([0], [1]), 2).group is None
    assert assemble("lookup", 0, rollouts([0], []), 1).group is not None


def test_truncated_rollouts_with_a_reward_count() -> None:
    cut = trajectory(0, 0.0, reason="token limit")
    group, _ = assemble("lookup", 0, [cut], 1)
    assert group is not None and group.members[0].reason == "token limit"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([trajectory(0), trajectory(0, attempt=1)], "twice"),
        ([trajectory(0), trajectory(1), trajectory(2)], "3 rollouts for 2"),
        ([trajectory(0, prompt=7)], "is no rollout of it"),
    ],
)
def test_what_is_no_group_is_refused(given: list, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        assemble("lookup", 0, given, 2)


def test_copies_are_not_assembled_again() -> None:
    group, _ = assemble("lookup", 0, rollouts([0, 1], []), 3)
    assert group is not None
    with pytest.raises(ValueError, match="padding copy"):
        assemble("lookup", 0, [group.members[-1]], 1)
