"""[N] What a snapshot says of itself: version, step, a digest per leaf, one for the tree, lineage.

Digests are over values, not files, so a version has the same digest wherever and however it is
stored. FORMAT.md is the specification.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_jax.arrays import AnyArray, Tree


class Leaf(NamedTuple):
    """One array of the parameter tree."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    """sha256 in hex over dtype, shape and bytes."""


class Manifest(NamedTuple):
    """A version is (`version`, `digest`) wherever it is a key."""

    version: int
    step: int
    """Updates applied when it was published."""
    digest: str
    """sha256 in hex over the sorted leaves."""
    parent: str
    """Digest of the version it descends from; empty for the first."""
    leaves: Mapping[str, Leaf]


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves by path, "blocks/0/kernel"; a ValueError names a path that two leaves share."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves of the tree are called {name}")
        named[name] = leaf
    return named


def describe(array: np.ndarray) -> Leaf:
    """The leaf's entry: sha256 over "dtype [n, m]\\n", then the bytes, row-major little-endian."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    sha = hashlib.sha256(header(array))
    sha.update(little.reshape(-1).view(np.uint8))
    return Leaf(array.dtype.name, tuple(array.shape), sha.hexdigest())


def header(array: AnyArray) -> bytes:
    """What comes before an array's bytes in its digest."""
    return f"{array.dtype.name} {list(array.shape)}\n".encode()


def tree_digest(leaves: Mapping[str, Leaf]) -> str:
    """sha256 over the lines "name digest\\n", sorted by name."""
    lines = "".join(f"{name} {leaves[name].digest}\n" for name in sorted(leaves))
    return hashlib.sha256(lines.encode()).hexdigest()


def build_manifest(params: Tree, version: int, step: int, parent: str) -> Manifest:
    """The manifest of a tree whose leaves can be read on the host."""
    if version < 0 or step < 0:
        raise ValueError(f"version {version} at step {step}: both count from 0")
    leaves = {name: describe(np.asarray(leaf)) for name, leaf in named_leaves(params).items()}
    return Manifest(version, step, tree_digest(leaves), parent, leaves)


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json."""
    leaves = {name: leaf._asdict() for name, leaf in sorted(manifest.leaves.items())}
    return json.dumps(manifest._asdict() | {"leaves": leaves}, indent=1) + "\n"


def from_json(text: str) -> Manifest:
    """The manifest of a text, its tree digest checked; a ValueError for any other text."""
    try:
        fields = json.loads(text)
        leaves = {
            name: Leaf(leaf["dtype"], tuple(leaf["shape"]), leaf["digest"])
            for name, leaf in fields.pop("leaves").items()
        }
        manifest = Manifest(leaves=leaves, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a manifest ({error})") from error
    if tree_digest(leaves) != manifest.digest:
        raise ValueError("its leaves do not have its digest")
    return manifest
