"""Which exception of a group is the cause: by hand, as task groups nest them."""

import asyncio

from launch.failure import first_cause
from rl_jax.config.base import UserError


def after(cause: BaseException) -> RuntimeError:
    follower = RuntimeError("the sampler has stopped")
    follower.__cause__ = cause
    return follower


def test_an_exception_alone_is_its_own_cause() -> None:
    error = ValueError("x")
    assert first_cause(error) is error
    assert first_cause(ExceptionGroup("a", [ExceptionGroup("b", [error])])) is error


def test_followers_are_not_causes() -> None:
    """The engine broke; rollouts, a swap and what waited for them fell with it."""
    cause = MemoryError("out of memory")
    rollouts = ExceptionGroup("rollouts", [after(cause) for _ in range(3)])
    assert first_cause(ExceptionGroup("all", [rollouts, cause, after(cause)])) is cause
    assert first_cause(ExceptionGroup("all", [after(after(cause)), cause])) is cause


def test_what_a_cancelled_program_left_is_no_cause() -> None:
    """The trainer ran out of time; the sampler was cancelled before its clients were."""
    cause = TimeoutError("no 2 groups")
    ended = [after(asyncio.CancelledError()), cause, after(KeyboardInterrupt())]
    assert first_cause(ExceptionGroup("all", ended)) is cause


def test_the_same_error_many_times_is_one() -> None:
    errors = [TimeoutError("no answer in 60 s") for _ in range(5)]
    assert first_cause(ExceptionGroup("all", errors)) is errors[0]


def test_a_mistake_of_the_users_goes_first() -> None:
    mistake = UserError("trainer.row_length = 64: needs at least 100")
    assert first_cause(ExceptionGroup("all", [OSError("other"), mistake])) is mistake


def test_causes_side_by_side_are_kept_together() -> None:
    group = ExceptionGroup("all", [OSError("one"), ValueError("two")])
    assert first_cause(group) is group


def test_a_circle_of_causes_ends() -> None:
    one, other = ValueError("one"), ValueError("two")
    one.__cause__, other.__cause__ = other, one
    group = ExceptionGroup("all", [one, other])
    assert first_cause(group) is group
