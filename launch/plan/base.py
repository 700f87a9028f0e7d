"""[N] What a plan says: bytes of one device, part by part."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import jax

from rl_jax.arrays import Tree

CHIPS: Mapping[str, int] = {"v5p": 95 * 10**9, "v6e": 32 * 10**9, "h200": 141 * 10**9}
"""Bytes of a device's memory, as their makers state them."""


class Part(NamedTuple):
    """Some of a device's bytes."""

    name: str
    bytes: int
    exact: bool
    """Follows from shapes and shardings alone; otherwise an estimate."""


class Program(NamedTuple):
    """One program's device at its fullest. Parts of one group are there at the same time."""

    name: str
    mesh: Mapping[str, int]
    held: tuple[Part, ...]
    """All the time."""
    moments: Mapping[str, tuple[Part, ...]]
    """What comes on top, by what is going on; one at a time."""

    @property
    def devices(self) -> int:
        return prod(self.mesh.values())

    @property
    def total(self) -> int:
        """Held, and the largest of what comes on top."""
        return total(self.held) + max(map(total, self.moments.values()))


def total(parts: tuple[Part, ...]) -> int:
    """Bytes of the parts together."""
    return sum(part.bytes for part in parts)


def bytes_of(tree: Tree) -> int:
    """Bytes of one device's shards of abstract arrays that have shardings."""

    def one(leaf: Any) -> int:
        return prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))
