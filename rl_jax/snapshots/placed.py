"""[H] Arrays between devices and the disk with little of them on the host at a time."""

import hashlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from rl_jax.arrays import Array
from rl_jax.snapshots.manifest import Leaf, describe, header

BLOCK = 2 << 20
"""Bytes of rows that are on the host at a time, unless one row has more."""


def writing() -> ocp.Context:
    """Orbax writes a leaf in blocks: to have a part of a block, a reader must decode all of it."""
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = BLOCK
    return context


def reading(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> ocp.Context:
    """Orbax reads the blocks of one shard of the largest leaf at a time, or as much of others."""
    context = _own_context()
    held = ocp.metadata(str(path.absolute())).metadata
    needs = (_blocks(held[name].storage_metadata, leaf) for name, leaf in wanted.items())
    context.memory.read_concurrent_bytes = max(needs, default=0) + 1
    return context


def _own_context() -> ocp.Context:
    """Of this process alone: Orbax waits for all of a world otherwise, also when it reads."""
    context = ocp.Context()
    if jax.process_count() > 1:
        own = jax.process_index()
        context.multiprocessing.primary_host = own
        context.multiprocessing.active_processes = {own}
        context.multiprocessing.barrier_sync_key_prefix = f"process-{own}"
    return context


def _blocks(storage: Any, leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of the blocks that a shard may touch."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    blocks = storage.chunk_shape
    touched = [
        min(-(-size // block), -(-part // block) + (part % block > 0)) * block
        for size, part, block in zip(leaf.shape, shard, blocks, strict=True)
    ]
    return prod(touched) * leaf.dtype.itemsize


def describe_placed(array: Array) -> Leaf:
    """`describe` of an array however it is cut over devices: rows are fetched a block at a time.

    (`np.asarray` puts all of it on the host, and the array keeps that copy.)
    """
    if not array.ndim:
        return describe(np.asarray(array))
    sha = hashlib.sha256(header(array))
    step = max(1, BLOCK // max(1, array.dtype.itemsize * prod(array.shape[1:])))
    for start in range(0, array.shape[0], step):
        rows = _rows(array, start, min(start + step, array.shape[0]))
        little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
        sha.update(little.reshape(-1).view(np.uint8))
    return Leaf(array.dtype.name, array.shape, sha.hexdigest())


def _rows(array: Array, start: int, stop: int) -> np.ndarray:
    out = np.empty((stop - start, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        first, last, _ = shard.index[0].indices(array.shape[0])
        low, high = max(start, first), min(stop, last)
        if low < high:
            # A new array: what the host is given of a shard itself stays with it.
            part = jax.lax.dynamic_slice_in_dim(shard.data, low - first, high - low)
            out[low - start : high - start, *shard.index[1:]] = np.asarray(part)
    return out
