"""[H] Compiling in less time, for programs that run for less time than they take to compile.

LLVM's passes are left out, and XLA's older emitter writes the kernels: it takes a quarter of the
time of the newer one, which sets up a compiler of its own for every kernel. XLA's passes stay: the
same collectives and placements; a sum may round otherwise. Sound where results are held to a bound
or to each other, not where a test is about the bits that a user gets. Code of the older emitter can
be slow: no programs of long loops, and no temporaries are compared with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import compiler
from jaxlib.xla_client import CompileOptions

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For `compiler_options`."""
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
"""The same in XLA_FLAGS, for every program of a process."""


@contextmanager
def quickly(on: bool = True) -> Iterator[None]:
    """As `QUICK`, or not `on` as usual: what is compiled inside, by any thread. A profile version,
    which says nothing to XLA for a CPU, keeps what is compiled here from being used elsewhere."""
    before = jax.config.read("jax_disable_most_optimizations")
    _switch(on)
    try:
        yield
    finally:
        _switch(before)


def _switch(on: bool) -> None:
    jax.config.update("jax_disable_most_optimizations", on)
    jax.config.update("jax_xla_profile_version", int(on))


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes in protobuf's encoding."""
    return b"".join(map(_varint, (number << 3 | 2, len(content)))) + content


def _varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + _varint(n >> 7)


OLDER_EMITTER = _field(3, _field(3, _field(500, _field(1, b"xla_cpu_disable_new_fusion_emitters"))))
"""executable_build_options.debug_options.xla_backend_extra_options: a map, which neither
`compiler_options` nor a configuration of jax can set, and XLA_FLAGS only for every program."""
_options = compiler.get_compile_options


def _with_older_emitter(*given: Any, **named: Any) -> Any:
    """jax's options; those of `QUICK` programs get the older emitter too (messages add up)."""
    made = _options(*given, **named)
    told = dict(made.env_option_overrides).get("xla_backend_optimization_level") == 0
    if told or jax.config.read("jax_disable_most_optimizations"):
        return CompileOptions.ParseFromString(made.SerializeAsString() + OLDER_EMITTER)
    return made


compiler.get_compile_options = _with_older_emitter
