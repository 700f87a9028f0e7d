"""The H200's programs of a whole policy that `run.py` compiles, with the Triton kernels."""

from collections.abc import Iterator

from tests.aot.policy import sampling, training
from tests.aot.run import Program

KERNELS = ("triton_kernel_call",)
"""A call does not show its kernel's name."""


def programs() -> Iterator[Program]:
    yield sampling("policy decode, 64 rows", 64, 1, 128, KERNELS)
    yield sampling("policy prefill, 4 x 256 tokens", 4, 256, 256, KERNELS)
    yield training(2, 2048, 2048, KERNELS)
