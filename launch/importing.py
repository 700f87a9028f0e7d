"""[H] `rl-jax import`: a checkpoint of someone else's becomes a published version and what goes
with it.

DIR/0 is the version, for `warm_start.snapshot`; model.toml the configuration's section; beside them
the tokenizer's files and config.json as they were; origin.json says how the tensors were kept.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from launch.origin import FORMAT, ORIGIN
from launch.staging import Staging, in_parts
from launch.terminal import Reporter
from models.checkpoint.constants import packed
from models.checkpoint.layout import DTYPES, CheckpointError, Leaf
from models.checkpoint.load import Checkpoint, open_checkpoint, stored_dtype
from models.checkpoint.place import shard_of
from rl_jax.config.base import UserError
from rl_jax.config.load import lines
from rl_jax.snapshots.leaves import GrowingSnapshot
from rl_jax.snapshots.store import SnapshotStore, sync_tree

MODEL = "model.toml"
VERSION = 0
PART = 256 << 20
"""Bytes of parameters that are written at a time, unless a single one is larger."""


def import_checkpoint(source: Path, out: Path, dtype: str, reporter: Reporter) -> None:
    """Makes `out` of the checkpoint `source`; goes on where a killed import stopped.

    UserError, and nothing written, for whatever is wrong with either.
    """
    try:
        checkpoint = open_checkpoint(source)
    except ValueError as error:
        raise UserError(str(error)) from error
    staging = Staging(out, "importing")
    plan = [dtype, checkpoint.source.config, *_identity(checkpoint)]
    staging.check(plan)
    kinds = {n: stored_dtype(checkpoint, leaf, dtype) for n, leaf in checkpoint.table.items()}
    growing = GrowingSnapshot(SnapshotStore(staging.path), VERSION)
    left = checkpoint.table.keys() - growing.told()
    staging.check_room(sum(_size(checkpoint.table[name], kinds[name]) for name in left))
    try:
        with staging.open(plan):
            _tell_losses(checkpoint, kinds, reporter)
            _write_leaves(checkpoint, growing, kinds, reporter)
            _write_rest(checkpoint, staging.path, dtype)
            sync_tree(staging.path)
            staging.finish()
    except CheckpointError as error:
        staging.discard()
        raise UserError(str(error)) from error


def _identity(checkpoint: Checkpoint) -> list[Any]:
    """What tells the source's files from others of their names."""
    source = checkpoint.source
    stats = [Path(file).stat() for file in sorted({t.file for t in source.tensors.values()})]
    return [[stat.st_size, stat.st_mtime_ns] for stat in stats] + [sorted(source.tensors.items())]


def _size(leaf: Leaf, kind: np.dtype) -> int:
    return prod(leaf.shape) * kind.itemsize


def _tell_losses(checkpoint: Checkpoint, kinds: dict[str, np.dtype], reporter: Reporter) -> None:
    """How many tensors are rounded: those will not be what they were when exported."""
    rounded = {
        part.tensor
        for name, leaf in checkpoint.table.items()
        for part in leaf.parts
        if kinds[name] not in (np.float32, DTYPES[checkpoint.source.tensors[part.tensor].dtype])
    }
    if rounded:
        reporter.note(f"{len(rounded)} tensors are rounded to another dtype: exported they differ")


def _write_leaves(
    checkpoint: Checkpoint,
    growing: GrowingSnapshot,
    kinds: dict[str, np.dtype],
    reporter: Reporter,
) -> None:
    growing.open()
    table = checkpoint.table
    reporter.phase("import", len(table), len(growing.leaves))
    left = {n: _size(leaf, kinds[n]) for n, leaf in table.items() if n not in growing.leaves}
    for names in in_parts(left, PART):
        part: dict[str, np.ndarray] = {}
        for name in names:
            whole = tuple(slice(0, size) for size in table[name].shape)
            part[name] = shard_of(checkpoint.source, table[name], whole, kinds[name])
            reporter.progress(len(growing.leaves) + len(part))
        growing.add(part)
    growing.finish()


def _write_rest(checkpoint: Checkpoint, path: Path, dtype: str) -> None:
    source = checkpoint.source
    for name, content in source.carried.items():
        (path / name).write_bytes(content)
    section = checkpoint.family.section(checkpoint.config)
    (path / MODEL).write_text("\n".join(lines({"model": section})).lstrip() + "\n")
    files = [
        {
            "name": file.name,
            "metadata": file.metadata,
            "tensors": [
                [name, source.tensors[name].dtype, list(source.tensors[name].shape)]
                for name in file.tensors
            ],
        }
        for file in source.files
    ]
    origin = {"format": FORMAT, "dtype": dtype, "carried": sorted(source.carried), "files": files}
    origin |= {"constants": packed(checkpoint.constants)}
    (path / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
