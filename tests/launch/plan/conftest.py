"""Simulations call small functions millions of times: checking each call's types takes minutes."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Types are not checked at calls, as outside of tests. Small simulations are run with them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
