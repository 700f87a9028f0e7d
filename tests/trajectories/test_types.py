"""What a trajectory and a group say of themselves."""

from dataclasses import replace

import numpy as np
import pytest

from rl_jax.trajectories.types import NOT_SAMPLED, Group, Status, copy_of
from tests.trajectories.build import trajectory


def test_arrays_must_align_with_tokens() -> None:
    own = trajectory(versions=(0, 1))
    with pytest.raises(ValueError, match="behavior_logprobs has 2 entries for 3 tokens"):
        replace(own, behavior_logprobs=own.behavior_logprobs[1:])


def test_versions_stand_exactly_where_tokens_were_sampled() -> None:
    own = trajectory(versions=(0, 1))
    with pytest.raises(ValueError, match="exactly where loss_mask is true"):
        replace(own, loss_mask=np.array([True, True, True]))
    with pytest.raises(ValueError, match="exactly where loss_mask is true"):
        replace(own, versions=np.array([NOT_SAMPLED, 0, NOT_SAMPLED], np.int32))


def test_valid_is_a_reward_that_says_something_of_the_policy() -> None:
    assert trajectory(reward=0.0).valid
    assert replace(trajectory(reward=1.0), status=Status.TRUNCATED).valid
    assert not trajectory(reward=None).valid
    assert not replace(trajectory(reward=1.0), status=Status.FAILED).valid


def test_oldest_version_ignores_what_was_not_sampled() -> None:
    assert trajectory(versions=(5, NOT_SAMPLED, 3)).oldest_version == 3
    assert trajectory(versions=(NOT_SAMPLED,)).oldest_version == NOT_SAMPLED


def test_a_group_is_as_old_as_its_oldest_token_and_counts_no_copy() -> None:
    members = (
        trajectory(0, versions=(4, 4)),
        trajectory(1, versions=(2,)),
        trajectory(2, versions=()),
    )
    own = Group("lookup", 0, (*members, copy_of(members[0])))
    assert own.oldest_version == 2
    assert own.sampled_tokens == 3
    assert Group("lookup", 0, members[2:]).oldest_version == NOT_SAMPLED


def test_a_copy_names_its_original() -> None:
    own = trajectory(7)
    assert copy_of(own).copy_of == 7
    assert copy_of(own).key == own.key
    assert copy_of(own).tokens is own.tokens
