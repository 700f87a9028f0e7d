"""[H] Files of the safetensors format: a header of JSON, then the tensors' bytes.

Read a run at a time: the format's own package maps the file into memory, and every page
it touched stays with the process. Written in place, tensor by tensor; the package wants a whole
file's tensors at once. Header: 8 bytes of length, little-endian, then name -> dtype, shape and
offsets behind the header.
"""

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from models.checkpoint.layout import DTYPES, CheckpointError, Tensor

_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2} | {
    "U32": 4, "I32": 4, "U64": 8, "I64": 8, "F64": 8
} | {name: dtype.itemsize for name, dtype in DTYPES.items()}  # fmt: skip
_LONGEST_HEADER = 100_000_000
"""The format's own limit, in bytes."""


class Header(NamedTuple):
    """`offsets` are places in the file; `metadata` is the map of strings that a writer left."""

    tensors: dict[str, Tensor]
    offsets: dict[str, int]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header, its offsets checked against each other and the file's length."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(
                f"{path}: truncated or no safetensors file: {size} bytes, its header needs "
                f"{8 + length}"
            )
        text = file.read(length)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: its header needs one JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ needs a map of strings")
    header = Header({}, {}, metadata)
    found = {name: _entry(path, name, entry) for name, entry in entries.items()}
    place = 8 + length
    for name, entry in sorted(found.items(), key=lambda item: item[1].offsets):
        place = _take(header, path, size, 8 + length, place, name, entry)
    if place != size:
        raise CheckpointError(f"{path}: {size - place} bytes are behind its last tensor")
    return header


class _Entry(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]


def _entry(path: Path, name: str, entry: Any) -> _Entry:
    table = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (table.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise CheckpointError(f"{path}: {name}: dtype needs a string")
    if not _naturals(shape):
        raise CheckpointError(f"{path}: {name}: shape needs a list of integers, each at least 0")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name}: data_offsets needs two integers, each at least 0")
    return _Entry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _take(
    header: Header, path: Path, size: int, data: int, place: int, name: str, entry: _Entry
) -> int:
    """Adds a tensor that has to begin at byte `place`; returns where it ends."""
    dtype, shape, (begin, end) = entry
    need = prod(shape) * _SIZES.get(dtype, 0)
    if dtype in _SIZES and end - begin != need:
        raise CheckpointError(
            f"{path}: {name} has {end - begin} bytes, {dtype} of shape {list(shape)} needs {need}"
        )
    if data + begin != place or end < begin:
        raise CheckpointError(
            f"{path}: {name} is at bytes {data + begin} to {data + end}, the tensor before it ends "
            f"at {place}"
        )
    if data + end > size:
        raise CheckpointError(
            f"{path}: truncated: {name} ends at byte {data + end}, the file has {size}"
        )
    header.tensors[name] = Tensor(str(path), dtype, shape)
    header.offsets[name] = data + begin
    return data + end


def read_run(path: str, offset: int, dtype: np.dtype, count: int) -> np.ndarray:
    """`count` numbers from byte `offset` of a file."""
    out = np.empty(count, dtype)
    view = memoryview(out.view(np.uint8))
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while len(view):
            done = file.readinto(view)
            if not done:
                raise OSError(f"{path} ends at byte {file.tell()}")
            view = view[done:]
    return out


def create(
    path: Path, tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> None:
    """A file of the right length with header and zeros for (name, dtype, shape), in order.

    Its blocks are taken now, so that an OSError tells of a full disk: who writes to a mapped file
    without a block is killed.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, dtype, shape in tensors:
        end = place + prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + place)


def mapped(path: Path, header: Header, name: str) -> np.memmap:
    """The tensor of a file made by `create`, to be written in place."""
    tensor = header.tensors[name]
    return np.memmap(path, DTYPES[tensor.dtype], "r+", header.offsets[name], tensor.shape)
