"""[H] Snapshots on disk: weights and manifest first, commit marker next, pointer last.

A version without its marker does not exist for any reader. FORMAT.md is the specification. Knows
neither samplers nor the journal.
"""

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from rl_jax.arrays import Tree
from rl_jax.snapshots.manifest import Manifest, from_json, named_leaves, to_json
from rl_jax.snapshots.placed import describe_placed, reading, writing
from rl_jax.snapshots.policies import Keep

MARKER = "COMMITTED"
POINTER = "latest"
MANIFEST = "manifest.json"
WEIGHTS = "weights"

_REFUSED = {"RESOURCE_EXHAUSTED": errno.ENOSPC, "PERMISSION_DENIED": errno.EACCES}
"""What tensorstore says, in a ValueError, where the system refuses to write."""
ONE_AT_A_TIME = threading.Lock()
"""Orbax has state of the whole process: of two saves at once, each may make the other's folder."""


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Orbax saves one thing in `path`; an OSError of one line where the system refuses to write."""
    try:
        with ONE_AT_A_TIME, writing():
            yield
    except ValueError as error:
        code = next((code for word, code in _REFUSED.items() if word in str(error)), None)
        if code is None:
            raise
        raise OSError(code, f"{path} cannot be written ({os.strerror(code)})") from error


@dataclass(frozen=True)
class SnapshotStore:
    """The directory `root`; it comes into being with the first `write`. Every method blocks."""

    root: Path

    def versions(self) -> tuple[int, ...]:
        """The committed versions, ascending."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        names = [p.name for p in found if p.name.isdecimal() and (p / MARKER).is_file()]
        return tuple(sorted(map(int, names)))

    def latest(self) -> int | None:
        """The version that the pointer names; None before the first."""
        path = self.root / POINTER
        if not path.is_file():
            return None
        text = path.read_text(errors="replace").strip()
        if not text.isdecimal():
            raise ValueError(f"{path}: {text!r} is not a version number")
        return int(text)

    def manifest(self, version: int) -> Manifest:
        """The manifest of a committed version."""
        path = self.root / str(version)
        if not path.is_dir():
            raise ValueError(f"{path}: no such snapshot; there are {list(self.versions())}")
        if not (path / MARKER).is_file():
            raise ValueError(f"{path / MARKER} is missing: the snapshot was never committed")
        _verify(path, [MANIFEST])
        try:
            manifest = from_json((path / MANIFEST).read_text())
        except ValueError as error:
            raise ValueError(f"{path / MANIFEST} is corrupt: {_line(error)}") from error
        if manifest.version != version:
            raise ValueError(f"{path / MANIFEST} is corrupt: it is of version {manifest.version}")
        return manifest

    def write(self, manifest: Manifest, params: Tree) -> None:
        """Writes weights and manifest, not committed yet.

        A committed version stays as it is: a ValueError unless it has the same digest. What a
        killed writer left uncommitted is replaced.
        """
        path = self.root / str(manifest.version)
        if (path / MARKER).is_file():
            if self.manifest(manifest.version).digest != manifest.digest:
                raise ValueError(f"{path} exists with other weights; a snapshot is never replaced")
            return
        self.clear(manifest.version)
        # Host arrays, which the digest needed anyway: Orbax writes them in half the time.
        host = {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}
        check_room(path, sum(leaf.nbytes for leaf in host.values()))
        with saving(path):
            ocp.save(str((path / WEIGHTS).absolute()), host)
        self.seal(manifest)

    def weights(self, version: int) -> Path:
        """Where a version's weights lie."""
        return self.root / str(version) / WEIGHTS

    def clear(self, version: int) -> None:
        """Makes the directory of a version that is not committed: a ValueError where it is. What a
        killed writer left there is removed."""
        path = self.root / str(version)
        if (path / MARKER).is_file():
            raise ValueError(f"{path} is committed; a snapshot is never replaced")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)

    def seal(self, manifest: Manifest) -> None:
        """Adds the manifest to weights that were written and brings all of it to the disk."""
        path = self.root / str(manifest.version)
        # It says where on this machine the run lies, and nobody reads it.
        (path / WEIGHTS / "commit_success.txt").unlink(missing_ok=True)
        (path / MANIFEST).write_text(to_json(manifest))
        sync_tree(path)

    def commit(self, manifest: Manifest) -> None:
        """Makes what was written exist; does nothing where it does."""
        path = self.root / str(manifest.version)
        if not (path / MARKER).is_file():
            _replace(path / MARKER, "".join(f"{_checksum(path, n)}\n" for n in _files(path)))
            _sync(self.root)

    def point(self, version: int) -> None:
        """Moves the pointer to a committed version; it never moves back."""
        self.manifest(version)
        latest = self.latest()
        if latest is None or latest < version:
            _replace(self.root / POINTER, f"{version}\n")

    def load(self, version: int, abstract: Tree) -> Tree:
        """The weights in the structure, dtypes and shardings of `abstract`, digests checked.

        `abstract` holds arrays or `jax.ShapeDtypeStruct`s with a sharding; no leaf passes through
        another sharding on its way. Another dtype is cast to after the check. A ValueError of one
        line names the file, or the leaf that does not fit.
        """
        manifest = self.manifest(version)
        path = self.root / str(version) / WEIGHTS
        wanted = named_leaves(abstract)
        _check_fit(path, manifest, wanted)
        # Before Orbax, which answers damage with errors of its own on many lines.
        _verify(path.parent, _listed(path.parent))
        stored = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, np.dtype(manifest.leaves[name].dtype), sharding=leaf.sharding
            )
            for name, leaf in wanted.items()
        }
        try:
            with ONE_AT_A_TIME, reading(path, stored):
                loaded = ocp.load(str(path.absolute()), stored)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is corrupt: {_line(error)}") from error
        for name, leaf in loaded.items():
            # A process of a world has a part of the values; the files are checked above.
            whole = leaf.is_fully_addressable
            if whole and describe_placed(leaf) != manifest.leaves[name]:
                raise ValueError(f"{path} is corrupt: {name} does not have its digest")
        leaves = [loaded.pop(name).astype(leaf.dtype) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def prune(self, keep: Keep) -> tuple[int, ...]:
        """Deletes the committed versions that `keep` lets go; returns them."""
        versions = self.versions()
        gone = [v for v in versions if v not in keep(versions) and v != self.latest()]
        for version in gone:
            path = self.root / str(version)
            # Without the marker first, a kill here would leave half a committed snapshot.
            (path / MARKER).unlink()
            _sync(path)
            shutil.rmtree(path)
        return tuple(gone)


def check_room(path: Path, needed: int) -> None:
    """Orbax answers a full disk late, from many threads, and on many lines."""
    free = shutil.disk_usage(path).free
    if free < needed:
        text = f"{path} needs {needed / 1e6:.1f} MB of disk, {free / 1e6:.1f} MB are free"
        raise OSError(errno.ENOSPC, text)


def _check_fit(path: Path, manifest: Manifest, wanted: Mapping[str, Any]) -> None:
    if set(wanted) != set(manifest.leaves):
        odd = sorted(set(wanted) ^ set(manifest.leaves))
        raise ValueError(f"{path} holds another tree: {odd[0]} is in only one of the two")
    for name, leaf in wanted.items():
        if tuple(leaf.shape) != manifest.leaves[name].shape:
            held = list(manifest.leaves[name].shape)
            raise ValueError(f"{path}: {name} has shape {held}, {list(leaf.shape)} expected")


def _files(path: Path) -> list[str]:
    """What the marker vouches for."""
    files = (p.relative_to(path) for p in path.rglob("*") if p.is_file())
    return sorted(f.as_posix() for f in files if not f.name.startswith(MARKER))


def _listed(path: Path) -> list[str]:
    lines = (path / MARKER).read_text(errors="replace").splitlines()
    return [line.partition("  ")[2] for line in lines]


def _checksum(path: Path, name: str) -> str:
    """The line that sha256sum writes."""
    with (path / name).open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}"


def _verify(path: Path, names: Sequence[str]) -> None:
    """The files are as they were committed."""
    marked = set((path / MARKER).read_text(errors="replace").splitlines())
    for name in names:
        if not (path / name).is_file() or _checksum(path, name) not in marked:
            raise ValueError(f"{path / name} is missing or not as {MARKER} has it: corrupt")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _replace(path: Path, text: str) -> None:
    """Atomically: a reader sees the old content or the new, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def sync_tree(path: Path) -> None:
    """Brings a directory and all in it to the disk, which serves many fsyncs at once in the time of
    a few."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_sync, (path, *path.rglob("*"))))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
