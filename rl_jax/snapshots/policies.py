"""[N] Which snapshots to keep: functions from the committed versions to those that stay.

The newest version always stays; the store sees to it.
"""

from collections.abc import Callable, Sequence

Keep = Callable[[Sequence[int]], frozenset[int]]
"""(committed versions, ascending) -> versions to keep."""


def keep_all(versions: Sequence[int]) -> frozenset[int]:
    """Every version."""
    return frozenset(versions)


def keep_last(n: int) -> Keep:
    """The newest `n` >= 1."""
    if n < 1:
        raise ValueError(f"keep_last({n}): at least 1")
    return lambda versions: frozenset(sorted(versions)[-n:])
