"""[N] The values of a config.json, each checked for what the models here can be."""

import json
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from models.checkpoint.layout import CheckpointError

MOST = 1e30
"""Of any number of a config."""
MOST_LAYERS = 10_000


class Fields:
    """`table` by name; a missing name takes the default, which is checked alike; a wrong
    value is a `CheckpointError`."""

    def __init__(self, table: Mapping[str, Any], prefix: str = ""):
        self._table = table
        self._prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        """Any value; null counts as missing."""
        value = self._table.get(name)
        return default if value is None else value

    def count(self, name: str, default: Any = None, least: int = 1, most: int = 2**31 - 1) -> int:
        """An integer from `least` to `most`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._refuse(name, value, f"an integer, at least {least}")
        if value > most:
            self._refuse(name, value, f"an integer, at most {most}")
        return value

    def number(self, name: str, default: Any = None) -> float:
        """A positive number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < inf:
            self._refuse(name, value, "a number")
        if not 0 < value <= MOST:
            self._refuse(name, value, f"a number above 0, at most {MOST:g}")
        return float(value)

    def flag(self, name: str, default: Any) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return value

    def only(self, name: str, allowed: Any, default: Any) -> None:
        """The one value that the models here know."""
        value = self.get(name, default)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            self._refuse(name, value, f"{_text(allowed)}, nothing else is built here")

    def table(self, name: str) -> "Fields":
        """A table within; an empty one where it is missing."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self._refuse(name, value, "a table")
        return Fields(value, f"{self._prefix}{name}.")

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of integers of at least 1; empty where it is missing."""
        value = self.get(name, [])
        if not isinstance(value, Sequence) or not all(
            type(one) is int and one >= 1 for one in value
        ):
            self._refuse(name, value, "a list of integers, each at least 1")
        return tuple(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where it is missing."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self._refuse(name, value, "a list of strings")
        return tuple(value)

    def _refuse(self, name: str, value: Any, need: str) -> None:
        if value is None:
            raise CheckpointError(f"{self._prefix}{name} is missing: needs {need}")
        raise CheckpointError(f"{self._prefix}{name} = {_text(value)}: needs {need}")


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
