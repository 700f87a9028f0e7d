"""[P] Block sizes of the Triton kernels on an H200: 132 multiprocessors, 227 KiB shared memory.

Chosen from what the compiler reports (registers, spills, shared memory), not from timings.
"""

from typing import NamedTuple

PROGRAMS = 120
"""Serial scans that fill the device."""


class Launch(NamedTuple):
    """How one kernel is started."""

    block: int
    """Channels or value columns per program or per step of one."""
    warps: int
    stages: int = 1
    """Chunks whose loads are in flight."""


SCORE_COTANGENTS = Launch(64, 4)


def per_chunk(key_width: int) -> Launch:
    """Channels per step of `prepare` and per program of `chunk_gradients`."""
    return Launch(min(key_width, 32), 4)


def scan(scans: int, value_width: int, bf16: bool) -> Launch:
    """Value columns per program of a serial scan, of which there are `scans` (rows x heads).

    The widest block that still fills the device: every block reads all keys again.
    """
    fits = [b for b in (64, 32, 16) if value_width % b == 0 and (bf16 or b <= 32)]
    block = next((b for b in fits if scans * value_width // b >= PROGRAMS), fits[-1])
    return Launch(block, 4, stages=2 if bf16 else 1)


def decode(value_width: int) -> Launch:
    """Value columns per program; the same for every batch, so results do not depend on it."""
    return Launch(next(b for b in (32, 16) if value_width % b == 0), 4)
