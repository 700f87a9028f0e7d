"""[H] A checkpoint opened and checked as a whole, and its parameters put on devices."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from models.checkpoint.check import check_tensors, check_tied, check_vocabulary
from models.checkpoint.constants import read_constants
from models.checkpoint.directory import Directory
from models.checkpoint.families import EMBEDDING, Family, family_of
from models.checkpoint.gguf_file import GgufFile
from models.checkpoint.layout import DTYPES, CheckpointError, Leaf, Table
from models.checkpoint.place import place
from models.checkpoint.source import Source
from rl_jax.arrays import Tree

AS_IS = "as-is"


class Checkpoint(NamedTuple):
    """`config` is the family's own; `table` makes its parameters of the source's tensors, all but
    the `constants`."""

    source: Source
    family: Family
    config: Any
    table: Table
    constants: Mapping[str, np.ndarray]


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face directory or a GGUF file, everything about it checked but the numbers.

    `CheckpointError` in one line that names the file and the tensor or key.
    """
    if path.is_dir():
        source = Directory(path)
    elif path.is_file():
        source = GgufFile(path)
    else:
        raise CheckpointError(f"{path}: no such file or directory")
    try:
        family = family_of(source.config)
        config = family.read_config(source.config)
    except ValueError as error:
        raise CheckpointError(f"{source.config_file}: {error}") from error
    table = family.table(config, source.tensors)
    constants = read_constants(source, family.frequencies(config))
    check_tensors(source, table, constants)
    check_vocabulary(source, EMBEDDING)
    check_tied(source, table)
    return Checkpoint(source, family, config, table, constants)


def stored_dtype(checkpoint: Checkpoint, leaf: Leaf, dtype: str) -> np.dtype:
    """`dtype` by name, or for `as-is` the one that holds all of the leaf's tensors."""
    if dtype != AS_IS:
        return np.dtype(dtype)
    kinds = {DTYPES[checkpoint.source.tensors[part.tensor].dtype] for part in leaf.parts}
    return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


def load_params(
    checkpoint: Checkpoint,
    sharding: Callable[[str], jax.sharding.Sharding],
    dtype: str = "float32",
) -> Tree:
    """The tree of parameters, each on `sharding(path)`; the host holds one device's part at a time.

    Parameters are nested dicts, "blocks/block_0/norm" inside out.
    """
    params: dict[str, Any] = {}
    for name, leaf in checkpoint.table.items():
        *parents, last = name.split("/")
        inside = params
        for parent in parents:
            inside = inside.setdefault(parent, {})
        kind = stored_dtype(checkpoint, leaf, dtype)
        inside[last] = place(checkpoint.source, leaf, sharding(name), kind)
    return params
