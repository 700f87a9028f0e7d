"""[H] A Hugging Face directory: config.json, one file of tensors or several with an index, and the
tokenizer's files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint.layout import DTYPES, CheckpointError, Tensor
from models.checkpoint.safetensors import Header, read_header, read_run
from models.checkpoint.source import CONFIG, TOKENIZER_CONFIG, File, carried_names

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_CARRIED = 64 << 20
"""Bytes of a file that is carried along, which is held in memory."""


class Directory:
    """The checkpoint in `path`; every header and length is checked when it is opened."""

    def __init__(self, path: Path):
        self.config_file = str(path / CONFIG)
        self.config: dict[str, Any] = read_json(path / CONFIG)
        headers = _headers(path)
        self.tensors: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        for header in headers.values():
            self.tensors |= header.tensors
            self._offsets |= header.offsets
        self.files = tuple(
            File(name, header.metadata, tuple(header.tensors)) for name, header in headers.items()
        )
        self.carried = _carried(path, self.config)

    def run(self, name: str, start: int, count: int) -> np.ndarray:
        """See `Source`."""
        tensor = self.tensors[name]
        dtype = DTYPES[tensor.dtype]
        offset = self._offsets[name] + start * dtype.itemsize
        return read_run(tensor.file, offset, dtype, count)


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: needs one JSON object")
    return table


def _carried(path: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    tokenizer = path / TOKENIZER_CONFIG
    names = carried_names(config, read_json(tokenizer) if tokenizer.is_file() else {})
    files = {name: path / name for name in names if (path / name).is_file()}
    for file in files.values():
        if (size := file.stat().st_size) > _LARGEST_CARRIED:
            raise CheckpointError(
                f"{file} has {size} bytes, at most {_LARGEST_CARRIED} are carried along"
            )
    return {name: file.read_bytes() for name, file in files.items()}


def _headers(path: Path) -> dict[str, Header]:
    """By name of file, each file's tensors checked against the index."""
    if not (path / INDEX).is_file():
        if not (path / WEIGHTS).is_file():
            raise CheckpointError(f"{path}: neither {WEIGHTS} nor {INDEX} is there")
        return {WEIGHTS: read_header(path / WEIGHTS)}
    places = read_json(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise CheckpointError(f"{path / INDEX}: weight_map is missing or no map to file names")
    headers: dict[str, Header] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (path / name).is_file():
            raise CheckpointError(f"{path / INDEX}: it names {name}, which is not there")
        headers[name] = read_header(path / name)
        found, listed = set(headers[name].tensors), {t for t, f in places.items() if f == name}
        for tensor in sorted(listed - found):
            raise CheckpointError(f"{path / name}: {tensor} is missing, {INDEX} has it there")
        for tensor in sorted(found - listed):
            raise CheckpointError(f"{path / name}: {tensor} is unexpected, {INDEX} has it not")
    return headers
