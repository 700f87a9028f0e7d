"""[H] Metrics on disk: `metrics.jsonl`, one JSON object a line, and the same for TensorBoard.

TensorBoard's own package writes its files; it comes with the `report` extra.
"""

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rl_jax.metrics import names

NOT_FINITE = "not_finite"
"""Key that lists the metrics of a line which were nan or infinite; their value is null."""


class JsonlWriter:
    """Appends to `path`; a last line that a crash cut short is removed first."""

    def __init__(self, path: Path) -> None:
        _drop_cut_line(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(
        self, step: int, policy_version: int, wall_seconds: float, values: Mapping[str, Any]
    ) -> None:
        """One line; values are numbers, 0-dimensional arrays, strings, or flat lists and tables of
        them. Raises TypeError for anything else."""
        head = {
            names.STEP: step,
            names.POLICY_VERSION: policy_version,
            names.WALL_SECONDS: round(wall_seconds, 3),
        }
        body = {name: _plain(value) for name, value in values.items() if name not in head}
        bad = [name for name, value in body.items() if not _finite(value)]
        body |= dict.fromkeys(bad) | ({NOT_FINITE: bad} if bad else {})
        self._file.write(json.dumps(head | body, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def can_write_tensorboard() -> bool:
    """Whether the tensorboard package is installed."""
    return find_spec("tensorboard") is not None


class TensorBoardWriter:
    """The scalars of each line, one event file in `directory` per writer."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer

        self._file = Writer(str(directory))

    def write(
        self, step: int, policy_version: int, wall_seconds: float, values: Mapping[str, Any]
    ) -> None:
        """As `JsonlWriter.write`; what is no number is left out, nan and infinity are kept."""
        head = {names.POLICY_VERSION: policy_version, names.WALL_SECONDS: wall_seconds}
        body = {name: _plain(value) for name, value in values.items() if name != names.STEP}
        for name, value in (body | head).items():
            if isinstance(value, int | float):
                self._file.add_scalar(name, value, step)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of `path`, oldest first; a line that is still being written is left out."""
    whole, newline, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n")] if newline else []


def _drop_cut_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with path.open("r+b") as file:
                file.truncate(whole)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    array = np.asarray(value)
    if array.ndim or array.dtype == object:
        raise TypeError(f"a metric is a number, not {type(value).__name__} of shape {array.shape}")
    return array.item() if array.dtype.kind in "biufS" else float(array)


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
