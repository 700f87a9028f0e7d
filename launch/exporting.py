"""[H] `rl-jax export`: a published version becomes a Hugging Face directory.

Names, dtypes, files and the tokenizer are those of the checkpoint that was imported. A version
whose weights are still those of the import comes out as it went in, byte for byte.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from launch.importing import PART
from launch.origin import ORIGIN, Origin, import_of, read_origin
from launch.staging import Staging, in_parts
from launch.terminal import Reporter
from models.checkpoint.directory import INDEX, WEIGHTS
from models.checkpoint.families import family_of
from models.checkpoint.layout import DTYPES, Table, restore, tensors_of
from models.checkpoint.safetensors import Header, create, mapped, read_header
from models.checkpoint.source import CONFIG, File
from rl_jax.config.base import UserError
from rl_jax.snapshots.leaves import read_leaves
from rl_jax.snapshots.manifest import Manifest
from rl_jax.snapshots.store import SnapshotStore, sync_tree


def export_snapshot(
    snapshot: Path, out: Path, max_shard_size: int | None, reporter: Reporter
) -> None:
    """Makes `out` of the version in `snapshot`; goes on where a killed export stopped.

    `max_shard_size` in bytes cuts the tensors into files anew; None keeps the cut they came in.
    UserError, and nothing written, for whatever is wrong.
    """
    if not snapshot.name.isdecimal():
        raise UserError(f"{snapshot}: needs a version's directory, as DIR/0")
    store = SnapshotStore(snapshot.parent)
    try:
        manifest = store.manifest(int(snapshot.name))
        origin = read_origin(import_of(snapshot.parent))
        table = _table(origin, manifest, snapshot)
    except ValueError as error:
        raise UserError(str(error)) from error
    files = origin.files if max_shard_size is None else _cut(origin, max_shard_size)
    staging = Staging(out, "exporting")
    plan = [manifest.digest, [file._asdict() for file in files], list(origin.tensors.items())]
    staging.check(plan)
    left = {p.tensor for name in table.keys() - staging.done for p in table[name].parts}
    staging.check_room(sum(_size(origin, name) for name in left))
    if rounded := _rounded(table, origin, manifest):
        reporter.note(f"{rounded} tensors of this version were rounded: they are not as imported")
    with staging.open(plan):
        _write_tensors(store, manifest, table, origin, files, staging, reporter)
        _write_rest(origin, files, staging.path)
        sync_tree(staging.path)
        staging.finish()


def _table(origin: Origin, manifest: Manifest, snapshot: Path) -> Table:
    """Checked against the version's leaves and the origin's tensors."""
    try:
        family = family_of(origin.config)
        table = family.table(family.read_config(origin.config), origin.tensors)
    except ValueError as error:
        raise UserError(f"{origin.path / CONFIG}: {error}") from error
    for name in sorted(set(table) ^ set(manifest.leaves)):
        raise UserError(
            f"{snapshot} is no version of the model in {origin.path / CONFIG}: {name} is in only "
            "one of the two"
        )
    for name, leaf in table.items():
        if manifest.leaves[name].shape != leaf.shape:
            raise UserError(
                f"{snapshot}: {name} has shape {list(manifest.leaves[name].shape)}, "
                f"{origin.path / CONFIG} gives {list(leaf.shape)}"
            )
    wanted = tensors_of(table)
    for name in sorted((wanted.keys() | origin.tensors) - origin.constants.keys()):
        held = origin.tensors[name][1] if name in origin.tensors else None
        if held != wanted.get(name):
            raise UserError(
                f"{origin.path / ORIGIN}: {name} {_of_shape(held)}, {origin.path / CONFIG} gives "
                f"that it {_of_shape(wanted.get(name))}"
            )
    return table


def _rounded(table: Table, origin: Origin, manifest: Manifest) -> int:
    """How many tensors have more digits in the origin's dtype than the version's has, as that of a
    sampler with `param_dtype`."""
    rounded = {
        part.tensor
        for name, leaf in table.items()
        for part in leaf.parts
        if np.dtype(manifest.leaves[name].dtype)
        not in (np.float32, DTYPES[origin.tensors[part.tensor][0]])
    }
    return len(rounded)


def _of_shape(shape: Sequence[int] | None) -> str:
    return "is no tensor" if shape is None else f"has shape {list(shape)}"


def _size(origin: Origin, name: str) -> int:
    dtype, shape = origin.tensors[name]
    return prod(shape) * DTYPES[dtype].itemsize


def _cut(origin: Origin, limit: int) -> tuple[File, ...]:
    """Files of at most `limit` bytes of tensors, in order, unless one tensor is larger."""
    sizes = {name: _size(origin, name) for name in origin.tensors}
    groups = list(in_parts(sizes, limit))
    metadata = origin.files[0].metadata
    if len(groups) == 1:
        return (File(WEIGHTS, metadata, tuple(groups[0])),)
    return tuple(
        File(f"model-{i:05}-of-{len(groups):05}.safetensors", metadata, tuple(names))
        for i, names in enumerate(groups, 1)
    )


def _write_tensors(
    store: SnapshotStore,
    manifest: Manifest,
    table: Table,
    origin: Origin,
    files: Sequence[File],
    staging: Staging,
    reporter: Reporter,
) -> None:
    """Leaf by leaf, each into its places in the files."""
    headers = _create(origin, files, staging)
    place = {name: file.name for file in files for name in file.tensors}
    for name, value in origin.constants.items():
        mapped(staging.path / place[name], headers[place[name]], name)[...] = value
    reporter.phase("export", len(table), len(staging.done))
    left = {name: manifest.leaves[name] for name in table if name not in staging.done}
    sizes = {n: prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for n, leaf in left.items()}
    for names in in_parts(sizes, PART):
        try:
            values = read_leaves(store, manifest, names)
        except ValueError as error:
            raise UserError(str(error)) from error
        for name in names:
            for part in table[name].parts:
                file = place[part.tensor]
                tensor = mapped(staging.path / file, headers[file], part.tensor)
                restore(part, values[name], tensor)
        sync_tree(staging.path)
        staging.mark(names)
        reporter.progress(len(staging.done))


def _create(origin: Origin, files: Sequence[File], staging: Staging) -> Mapping[str, Header]:
    for file in files:
        path = staging.path / file.name
        if not path.is_file() or not staging.done:
            create(path, [(name, *origin.tensors[name]) for name in file.tensors], file.metadata)
    sync_tree(staging.path)
    return {file.name: read_header(staging.path / file.name) for file in files}


def _write_rest(origin: Origin, files: Sequence[File], path: Path) -> None:
    for name in origin.carried:
        (path / name).write_bytes((origin.path / name).read_bytes())
    if len(files) > 1 or files[0].name != WEIGHTS:
        total = sum(_size(origin, name) for name in origin.tensors)
        places = {name: file.name for file in files for name in file.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
