"""[N] Where trajectories go in packed rows: starts at multiples of 64, no trajectory is split.

Because a chunk then holds one segment and training cuts equal prefill cuts, packing changes no bit
of the forward pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rl_jax.arrays import CHUNK, round_up


class Place(NamedTuple):
    """The row and column where a trajectory starts."""

    row: int
    start: int


def pack(lengths: Sequence[int], row_length: int) -> list[Place]:
    """First fit by decreasing length, ties in input order; the same input gives the same places.

    `row_length` is a multiple of 64. Raises ValueError for a trajectory longer than a row.
    """
    if row_length % CHUNK:
        raise ValueError(f"row_length must be a multiple of {CHUNK}, got {row_length}")
    places: list[Place | None] = [None] * len(lengths)
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = round_up(lengths[index], CHUNK)
        if need > row_length:
            raise ValueError(
                f"a trajectory of {lengths[index]} tokens exceeds a row of {row_length}"
            )
        row = next((r for r, filled in enumerate(used) if filled + need <= row_length), len(used))
        if row == len(used):
            used.append(0)
        places[index] = Place(row, used[row])
        used[row] += need
    return [place for place in places if place is not None]
