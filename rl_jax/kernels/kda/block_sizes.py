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


def prepare(key_width: int) -> Launch:
    """Channels per step."""
    return Launch(min(key_width, 32), 4)


def score_cotangents(value_width: int) -> Launch:
    """Value columns per step, here and in `chunk_gradients`."""
    return Launch(next(b for b in (32, 16) if value_width % b == 0), 4)


def chunk_gradients(key_width: int) -> Launch:
    """Channels per program; with more of them its registers spill by the hundred."""
    return Launch(min(key_width, 16), 4)


def scan(scans: int, value_width: int, bf16: bool) -> Launch:
    """Value columns per program of a serial scan, of which there are `scans` (rows x heads).

    The widest block that still fills the device: every block reads all keys again. Of float32, 64
    columns do not fit into the registers.
    """
    fits = [b for b in (64, 32, 16) if value_width % b == 0 and (bf16 or b <= 32)]
    return Launch(next((b for b in fits if scans * value_width // b >= PROGRAMS), fits[-1]), 4)


def decode(value_width: int) -> Launch:
    """Value columns per program; the same for every batch, so results do not depend on it."""
    return Launch(next(b for b in (32, 16) if value_width % b == 0), 4)
