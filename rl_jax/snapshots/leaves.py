"""[H] A snapshot leaf by leaf: written in parts that outlive a kill, and read one at a time.

For weights that come from elsewhere and may be larger than the host's memory. Orbax keeps each part
as a pending folder and merges the folders at the end; a journal beside them says which are whole.
"""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from orbax.checkpoint import v1 as ocp

from rl_jax.arrays import AnyArray
from rl_jax.snapshots.manifest import Leaf, Manifest, describe, tree_digest
from rl_jax.snapshots.store import ONE_AT_A_TIME, WEIGHTS, SnapshotStore, saving, sync_tree

JOURNAL = "written.jsonl"
_PENDING = f"{WEIGHTS}.partial_save"
_MERGING = "merging"


@dataclass
class GrowingSnapshot:
    """Version `version` of a store while its leaves arrive. One process at a time."""

    store: SnapshotStore
    version: int
    leaves: dict[str, Leaf] = field(default_factory=dict)
    """What is written, also by a process that was killed."""

    @property
    def path(self) -> Path:
        """Where the parts are; the version's own directory comes into being at the end."""
        return self.store.root / f"{self.version}.growing"

    def told(self) -> dict[str, Leaf]:
        """What an earlier process wrote; changes nothing."""
        if self.version in self.store.versions():
            return dict(self.store.manifest(self.version).leaves)
        return {
            name: Leaf(dtype, tuple(shape), digest)
            for line in self._lines()
            for name, (dtype, shape, digest) in line["leaves"].items()
        }

    def open(self) -> None:
        """Takes up what an earlier process left; a part that it did not finish is removed."""
        self.leaves |= self.told()
        if self.version in self.store.versions():
            return
        self.path.mkdir(parents=True, exist_ok=True)
        drop_cut_line(self.path / JOURNAL)
        whole = {line["folder"] for line in self._lines()}
        pending = self.path / _PENDING
        for path in pending.iterdir() if pending.is_dir() else ():
            if path.name not in whole:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def add(self, leaves: Mapping[str, AnyArray]) -> None:
        """Writes more leaves; they are there for good when this returns."""
        host = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        told = {name: describe(leaf) for name, leaf in host.items()}
        before = self._folders()
        with saving(self.path):
            ocp.partial.save(str((self.path / WEIGHTS).absolute()), host)
        (folder,) = self._folders() - before
        sync_tree(self.path / _PENDING / folder)
        with (self.path / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"folder": folder, "leaves": told}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.leaves |= told

    def finish(self, step: int = 0, parent: str = "") -> Manifest:
        """Merges the parts, commits the version and points to it.

        A kill on the way costs no leaf: what is merged are other names for the same files.
        """
        if self.version not in self.store.versions():
            manifest = Manifest(self.version, step, tree_digest(self.leaves), parent, self.leaves)
            self._merge()
            self.store.seal(manifest)
            self.store.commit(manifest)
        self.store.point(self.version)
        shutil.rmtree(self.path, ignore_errors=True)
        return self.store.manifest(self.version)

    def _merge(self) -> None:
        merged, final = self.path / _MERGING, self.store.root / str(self.version)
        for stale in (merged, self.path / f"{_MERGING}.partial_save", final):
            shutil.rmtree(stale, ignore_errors=True)
        shutil.copytree(self.path / _PENDING, f"{merged}.partial_save", copy_function=_same_or_copy)
        with saving(final):
            ocp.partial.finalize(str(merged.absolute()))
        final.mkdir()
        merged.rename(final / WEIGHTS)

    def _folders(self) -> set[str]:
        pending = self.path / _PENDING
        return {path.name for path in pending.iterdir()} if pending.is_dir() else set()

    def _lines(self) -> list[dict[str, Any]]:
        """Of the journal; a last line that was cut is none."""
        path = self.path / JOURNAL
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]


def drop_cut_line(path: Path) -> None:
    """Takes what a kill left of a last line from a file of lines, before more are appended."""
    if path.is_file():
        whole = path.read_bytes().rpartition(b"\n")
        os.truncate(path, len(whole[0] + whole[1]))


def _same_or_copy(source: str, target: str) -> None:
    """Orbax rewrites the small files when it merges and never those of data, which share a `d`."""
    if Path(source).parent.name == "d":
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def read_leaves(
    store: SnapshotStore, manifest: Manifest, names: Collection[str]
) -> dict[str, np.ndarray]:
    """Leaves of a committed version on the host; a ValueError where one has not its digest."""
    path = store.root / str(manifest.version) / WEIGHTS
    told = {name: manifest.leaves[name] for name in names}
    wanted = {name: np.empty(leaf.shape, np.dtype(leaf.dtype)) for name, leaf in told.items()}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with ONE_AT_A_TIME, context:
            loaded = ocp.load(str(path.absolute()), wanted)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{path} is corrupt: {first}") from error
    for name, leaf in told.items():
        if describe(np.asarray(loaded[name])) != leaf:
            raise ValueError(f"{path} is corrupt: {name} does not have its digest")
    return {name: np.asarray(loaded[name]) for name in told}
