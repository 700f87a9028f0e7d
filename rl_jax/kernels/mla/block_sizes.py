"""[P] Block sizes of the Triton kernels on an H200: 132 multiprocessors, 227 KiB shared memory.

Chosen from what the compiler reports (registers, spills, shared memory), not from timings.
"""

from typing import NamedTuple

PART = 16
"""Pages (of 64 tokens) per part of a decode. Constant, so that bits do not depend on the batch."""


class Launch(NamedTuple):
    """How one kernel is started."""

    resident: int
    """Rows that one program holds."""
    passing: int
    """Rows per step of what passes by: a divisor of 64 and of what is held."""
    warps: int
    stages: int = 1
    """Steps whose loads are in flight."""


def heads_forward(bf16: bool) -> Launch:
    """Queries held, keys passing."""
    return Launch(128, 64, 8, stages=2) if bf16 else Launch(32, 32, 4)


def query_gradients(bf16: bool) -> Launch:
    """Queries held, keys passing."""
    return Launch(128, 64, 8, stages=2) if bf16 else Launch(32, 16, 4)


def key_gradients(bf16: bool) -> Launch:
    """Keys held, queries passing."""
    return Launch(128, 32, 8, stages=2) if bf16 else Launch(32, 16, 4)


def decode(heads: int, bf16: bool) -> Launch:
    """Queries (tokens x heads) held, tokens of pages passing.

    The same for any number of tokens, so bits do not depend on it. Up to 32 heads a token's pages
    are read once, by two programs per multiprocessor.
    """
    if not bf16:
        return Launch(32, 16, 8)
    return Launch(32, 32, 4, stages=2) if heads <= 32 else PREFILL


PREFILL = Launch(64, 32, 8, stages=2)
"""Queries (tokens x heads) held, tokens of pages passing."""
MERGE = Launch(1, 1, 4)
