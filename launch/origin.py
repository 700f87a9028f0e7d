"""[H] What an import left of the checkpoint it took in, checked before anything is made of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from models.checkpoint.constants import unpacked
from models.checkpoint.directory import read_json
from models.checkpoint.layout import DTYPES, CheckpointError
from models.checkpoint.source import CONFIG, TOKENIZER_CONFIG, File, carried_names
from rl_jax.config.base import UserError
from rl_jax.config.load import load

ORIGIN = "origin.json"
FORMAT = 1


class Origin(NamedTuple):
    """`tensors` are (dtype, shape) by name."""

    path: Path
    config: dict[str, Any]
    files: tuple[File, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    carried: tuple[str, ...]
    constants: dict[str, np.ndarray]
    """Tensors that are no parameters."""


def _of_weights(name: str) -> str:
    """No way out of the directory that files are written to, nor onto another kind of file."""
    if Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file of tensors")
    return name


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r}: there is {', '.join(DTYPES)}")
    return dtype


class _File(BaseModel):
    model_config = ConfigDict(strict=True)
    name: Annotated[str, AfterValidator(_of_weights)]
    metadata: dict[str, str]
    tensors: list[tuple[str, Annotated[str, AfterValidator(_known)], list[NonNegativeInt]]]


class _Origin(BaseModel):
    model_config = ConfigDict(strict=True)
    format: Literal[1]
    carried: list[str]
    files: Annotated[list[_File], Field(min_length=1)]
    constants: dict[str, str] = {}
    """Left out by imports that knew of none."""


def read_origin(path: Path) -> Origin:
    """Of the directory that an import made; a ValueError of one line for what is wrong in it."""
    where = path / ORIGIN
    try:
        told = _Origin.model_validate_json(where.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise CheckpointError(f"{where}: {place}: {first['msg']}") from error
    config = read_json(path / CONFIG)
    _check_carried(path, config, told.carried)
    listed = [one for file in told.files for one in file.tensors]
    tensors = {name: (dtype, tuple(shape)) for name, dtype, shape in listed}
    if len(tensors) != len(listed) or len({file.name for file in told.files}) != len(told.files):
        raise CheckpointError(f"{where}: a file or a tensor is listed twice")
    files = tuple(
        File(file.name, file.metadata, tuple(name for name, _, _ in file.tensors))
        for file in told.files
    )
    constants = {
        name: _constant(where, name, text, tensors) for name, text in told.constants.items()
    }
    return Origin(path, config, files, tensors, tuple(told.carried), constants)


def _constant(
    where: Path, name: str, text: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> np.ndarray:
    try:
        return unpacked(text, *tensors[name])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{where}: constants: {name} is not a tensor of its files") from error


def _check_carried(path: Path, config: dict[str, Any], carried: list[str]) -> None:
    tokenizer = path / TOKENIZER_CONFIG
    known = carried_names(config, read_json(tokenizer) if tokenizer.is_file() else {})
    for name in carried:
        if name not in known:
            raise CheckpointError(f"{path / ORIGIN}: carried: {name!r} is no file that is carried")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name}: no such file, {ORIGIN} beside it names it")


def import_of(root: Path) -> Path:
    """The import that the versions in `root` descend from: there, or where their run began.

    A run may have begun with a version of another run. UserError where none is found.
    """
    place, seen = root, set[Path]()
    while not (place / ORIGIN).is_file():
        settings = place.parent / "config.toml"
        first = None
        if place.resolve() not in seen and settings.is_file():
            first = load(settings, check_files=False).warm_start.snapshot
        if first is None:
            raise UserError(
                f"{root}: no {ORIGIN} is there, nor where its run began: only what descends from "
                "a checkpoint that `rl-jax import` took in can be exported"
            )
        seen.add(place.resolve())
        place = Path(first).parent
    return place
