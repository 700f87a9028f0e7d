"""The suite runs under strict promotion of dtypes and ranks, so what it compiles stays compiled."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def strict(strict_numerics: Iterator[None]) -> None:
    """Every test of this folder."""
