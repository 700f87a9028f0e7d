"""[H] Compiling in less time, for programs that run for less time than they take to compile.

LLVM's passes are left out, not XLA's: the same operations in the same order, and the same
collectives, temporaries and placements; a sum may round otherwise. Sound where results are held to
a bound or to each other, not where a test is about the bits that a user gets.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For `compiler_options`."""


@contextmanager
def quickly() -> Iterator[None]:
    """The same for what is compiled inside, by whatever thread."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
