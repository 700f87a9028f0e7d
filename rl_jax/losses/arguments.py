"""[N] What is asked of the numbers that parts are made with; errors name the part and the argument.

Written so that nan fails every check.
"""

import math
from collections.abc import Collection


def positive(part: str, argument: str, value: float) -> float:
    """`value`, if it is above 0 and finite."""
    if not 0.0 < value < math.inf:
        raise ValueError(f"{part}: {argument} must be positive and finite, got {value}")
    return value


def inside_unit(part: str, argument: str, value: float) -> float:
    """`value`, if it lies in the open interval (0, 1)."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{part}: {argument} must lie in (0, 1), got {value}")
    return value


def ordered(part: str, low: float | None, high: float | None) -> None:
    """ValueError unless there is a bound, and `low` is below `high` where there are two."""
    if low is None and high is None:
        raise ValueError(f"{part}: needs low, high or both, got neither")
    for argument, bound in (("low", low), ("high", high)):
        if bound is not None and math.isnan(bound):
            raise ValueError(f"{part}: {argument} must be a number, got {bound}")
    if low is not None and high is not None and not low < high:
        raise ValueError(f"{part}: low must be below high, got {low} and {high}")


def one_of(part: str, argument: str, value: str, choices: Collection[str]) -> str:
    """`value`, if it is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{part}: {argument} must be one of {', '.join(choices)}, got {value!r}")
    return value
