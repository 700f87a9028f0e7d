"""[N] How tensors of a file and parameters of ours are made of each other.

A table says it once for both ways: a `Part` is a region of one tensor that is, axes in another
order, a region of one parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
}
"""What a parameter may be stored as, by safetensors' names."""

RUN = 1 << 20
"""Numbers of a tensor that are read at once."""

Index = tuple[int | slice, ...]
"""An integer or a slice of step 1 for each of the first axes; further axes whole."""


class CheckpointError(ValueError):
    """What is wrong with a checkpoint, in one line that names the file and the tensor."""


class Part(NamedTuple):
    """`tensor.reshape(split)[take].transpose(order)` is `parameter[at]`."""

    tensor: str
    shape: tuple[int, ...]
    """As the file has it."""
    split: tuple[int, ...]
    """The same numbers in the same order, by other axes: rows by head, for instance."""
    order: tuple[int, ...]
    take: Index = ()
    at: Index = ()


class Leaf(NamedTuple):
    """A parameter and the parts that fill it."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


Table = Mapping[str, Leaf]
"""Path of a parameter, as "blocks/block_0/ffn/up" -> how it is made."""


class Tensor(NamedTuple):
    """What a file says of a tensor: where it lies, `dtype` in the file's own words, `shape`."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def plain(tensor: str, shape: Sequence[int], order: Sequence[int] = (), at: Index = ()) -> Part:
    """A whole tensor of `shape`, axes in another order."""
    order = tuple(order) or tuple(range(len(shape)))
    return Part(tensor, tuple(shape), tuple(shape), order, (), at)


def leaf_of(part: Part) -> Leaf:
    """A parameter that is this part and nothing else."""
    sizes = [stop - start for start, stop in _bounds(part.take, part.split)]
    return Leaf(tuple(sizes[axis] for axis in part.order), (part,))


def heads_out(tensor: str, heads: int, head_dim: int, inputs: int) -> Leaf:
    """[heads * head_dim, inputs] -> [inputs, heads, head_dim]."""
    split = (heads, head_dim, inputs)
    return leaf_of(Part(tensor, (heads * head_dim, inputs), split, (2, 0, 1)))


def heads_in(tensor: str, outputs: int, heads: int, head_dim: int) -> Leaf:
    """[outputs, heads * head_dim] -> [heads, head_dim, outputs]."""
    split = (outputs, heads, head_dim)
    return leaf_of(Part(tensor, (outputs, heads * head_dim), split, (1, 2, 0)))


def tensors_of(table: Table) -> dict[str, tuple[int, ...]]:
    """Every tensor that the table speaks of and its shape, in the table's order."""
    return {part.tensor: part.shape for leaf in table.values() for part in leaf.parts}


def _bounds(index: Index, shape: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) for each axis; an integer is one wide."""
    whole = [*index, *[slice(None)] * (len(shape) - len(index))]
    return [
        (one, one + 1) if isinstance(one, int) else one.indices(size)[:2]
        for one, size in zip(whole, shape, strict=True)
    ]


def overlap(leaf: Leaf, part: Part, shard: Index) -> tuple[tuple[slice, ...], Index] | None:
    """What of `part` lies in `parameter[shard]`: (region of `split`, region of the shard).

    None where nothing does.
    """
    at = _bounds(part.at, leaf.shape)
    wanted = _bounds(shard, leaf.shape)
    take = _bounds(part.take, part.split)
    region: list[slice] = [slice(None)] * len(part.split)
    inside: list[int | slice] = []
    axes = iter(part.order)
    for axis, ((start, stop), (low, high)) in enumerate(zip(at, wanted, strict=True)):
        first, last = max(start, low), min(stop, high)
        if first >= last:
            return None
        if axis < len(part.at) and isinstance(part.at[axis], int):
            inside.append(first - low)
            continue
        inside.append(slice(first - low, last - low))
        source = next(axes)
        offset = take[source][0] - start
        region[source] = slice(first + offset, last + offset)
    return tuple(region), tuple(inside)


def as_split(part: Part, block: np.ndarray) -> np.ndarray:
    """A view of a region of the parameter with its axes in the tensor's order."""
    return block.transpose(np.argsort(part.order))


def restore(part: Part, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """Writes what `part` says from the parameter `leaf` into the file's `tensor`."""
    region = tensor.reshape(part.split)[part.take]
    region[...] = as_split(part, leaf[part.at])


def blocks(
    split: Sequence[int], region: Sequence[slice], limit: int, start: int = 0
) -> Iterator[tuple[Index, int, tuple[int, ...], tuple[slice, ...]]]:
    """A region as runs of at most `limit` numbers, unless one row of the last axis is longer.

    Yields (place in the region, first number of the run, shape of the run, region of the run).
    """
    row = prod(split[1:])
    first, last, _ = region[0].indices(split[0])
    if row > limit and len(split) > 1:
        for i in range(first, last):
            for place, begin, shape, inner in blocks(split[1:], region[1:], limit, start + i * row):
                yield (i - first, *place), begin, shape, inner
        return
    step = max(1, limit // row)
    for low in range(first, last, step):
        high = min(low + step, last)
        run = (high - low, *split[1:])
        place = (slice(low - first, high - first),)
        yield place, start + low * row, run, (slice(None), *region[1:])
