"""[H] From a checkpoint's tensors straight into a parameter's sharding, device by device.

On the host there is never more than one device's part and one run of a file.
"""

import jax
import numpy as np

from models.checkpoint.layout import RUN, CheckpointError, Leaf, as_split, blocks, overlap
from models.checkpoint.source import Source
from rl_jax.arrays import Array


def shard_of(source: Source, leaf: Leaf, shard: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """The region `shard` of a parameter, on the host; `CheckpointError` for NaN and infinity."""
    bounds = [one.indices(size)[:2] for one, size in zip(shard, leaf.shape, strict=True)]
    out = np.empty([stop - start for start, stop in bounds], dtype)
    for part in leaf.parts:
        found = overlap(leaf, part, shard)
        if found is None:
            continue
        region, inside = found
        into = as_split(part, out[inside])
        for place, start, shape, inner in blocks(part.split, region, RUN):
            run = source.run(part.tensor, start, int(np.prod(shape)))
            if not np.isfinite(run).all():
                file = source.tensors[part.tensor].file
                raise CheckpointError(f"{file}: {part.tensor} has numbers that are not finite")
            into[place] = run.reshape(shape)[inner]
    return out


def place(source: Source, leaf: Leaf, sharding: jax.sharding.Sharding, dtype: np.dtype) -> Array:
    """The parameter on the devices of `sharding` that this process has.

    Devices with the same part get it from one reading. (`jax.make_array_from_callback` would hold
    every device's part on the host before it places the first.)
    """
    whole = tuple(slice(0, size) for size in leaf.shape)
    parts: dict[tuple[tuple[int, int], ...], Array] = {}
    placed = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        shard = whole if index is None else index
        key = tuple(one.indices(n)[:2] for one, n in zip(shard, leaf.shape, strict=True))
        if key not in parts:
            host = shard_of(source, leaf, shard, dtype)
            parts[key] = jax.block_until_ready(jax.device_put(host, device))
            del host
            placed.append(parts[key])
        else:
            placed.append(jax.device_put(parts[key], device))
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, placed)
