"""[N] What stopped a run: the first cause among all that followed from it."""

from collections.abc import Iterator

from rl_jax.config.base import UserError


def first_cause(error: BaseException) -> BaseException:
    """The one exception in a group that no other brought about, however deep the groups nest.

    A follower has another of them, or the end of a task, in the chain of its causes. A mistake of
    the user's goes before everything; where several causes stand side by side the group is kept.
    """
    found = list(_leaves(error))
    roots = [e for e in found if not any(c in found or _ending(c) for c in _causes(e))]
    mistakes = [e for e in roots if isinstance(e, UserError)]
    distinct = {(type(e), str(e)): e for e in reversed(mistakes or roots)}
    return next(iter(distinct.values())) if len(distinct) == 1 else error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = [error]
    while (cause := seen[-1].__cause__) is not None and cause not in seen:
        seen.append(cause)
        yield cause


def _ending(cause: BaseException) -> bool:
    """Cancelled or interrupted: not an `Exception`."""
    return not isinstance(cause, Exception)
