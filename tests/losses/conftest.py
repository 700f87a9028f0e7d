"""Numbers of losses are held to a bound: programs are compiled quickly."""

from collections.abc import Iterator

import pytest

from tests.fakes.compiling import quickly


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly() -> Iterator[None]:
    with quickly():
        yield
