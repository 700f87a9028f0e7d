"""[P] Which backend runs an operation: the one asked for by name, or the first that can."""

import warnings
from collections.abc import Mapping
from functools import cache

import jax

PLAIN = "xla"
"""Runs everything everywhere; on an accelerator, only for want of a kernel."""


def choose[Backend](
    name: str | None, backends: Mapping[str, Backend], obstacles: Mapping[str, str]
) -> Backend:
    """Of `backends` the one called `name`; without a name the first that has no obstacle.

    `obstacles` says of each why it cannot run here, '' where it can. ValueError where the one asked
    for is unknown or cannot run. By default an accelerator that gets `xla` is told why, once.
    """
    if name is None:
        name = next(name for name, obstacle in obstacles.items() if not obstacle)
        if name == PLAIN and jax.default_backend() != "cpu":
            passed = [f"{other} cannot run: {why}" for other, why in obstacles.items() if why]
            _tell(f"backend: xla on {jax.default_backend()}, for {'; '.join(passed)}")
    if name not in obstacles:
        raise ValueError(f"backend: {name!r} is not one of {', '.join(obstacles)}")
    if obstacles[name]:
        raise ValueError(f"backend: {name} cannot run here: {obstacles[name]}")
    return backends[name]


@cache
def _tell(message: str) -> None:
    """Once a process, however often the same is traced."""
    warnings.warn(message, stacklevel=3)
