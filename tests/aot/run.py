"""Compiles every TPU and GPU kernel without such a device: `make test-aot`.

    AOT/bin/python -m tests.aot.run [name of a file in this folder ...]

A file *_tpu.py lists its programs: each is compiled for three generations of chips, and its
temporaries are held against its bound. A file *_gpu.py does the same for the H200. Meanwhile jax's
default backend, which is what the choice of a kernel asks, is said to be such a device. A file
*_triton.py is a script that checks itself, and so is kimi_1m.py, which runs where it is named: it
takes long. Prints a line for each program; exit status 1 if one
does not compile or breaches its bound.
"""

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# No device is opened, so two processes may have the library at once.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from jax_triton import triton_lib

from rl_jax.arrays import Tree
from rl_jax.sharding import make_mesh

CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
H200 = "h200"
FOLDER = Path(__file__).parent
MEBI = 2**20


class Program(NamedTuple):
    """One function to compile and what it may need."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Tree, ...]
    """Trees of `jax.ShapeDtypeStruct`."""
    limit: int
    """Bytes of temporaries of a device."""
    donated: tuple[int, ...] = ()
    """Operands whose memory the results take: all of it must be taken."""
    mesh: tuple[int, int] = (1, 1)
    """Devices over data and over tensor: nothing may be gathered."""
    cuts: tuple[PartitionSpec, ...] = ()
    """Of each operand; whole where there are none."""
    kernels: tuple[str, ...] = ()
    """Names of kernels that must be in it."""


class Result(NamedTuple):
    program: str
    chip: str
    seconds: float
    temporaries: int
    limit: int
    fault: str


def bytes_of(structs: Tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(structs))


def compiled(program: Program, chip: str) -> Result:
    """Compiles for one chip or a mesh of them; a fault is the compiler's first line or a breach."""
    started = time.monotonic()
    mesh = make_mesh(devices_of(chip), *program.mesh)
    backend, platform = ("gpu", "cuda") if chip == H200 else ("tpu", "tpu")
    cuts = program.cuts or (PartitionSpec(),) * len(program.operands)
    temporaries, fault = 0, ""
    try:
        with jax.set_mesh(mesh), mock.patch.object(jax, "default_backend", lambda: backend):
            placed = [
                placed_at(x, NamedSharding(mesh, cut))
                for x, cut in zip(program.operands, cuts, strict=True)
            ]
            traced = jax.jit(program.function, donate_argnums=program.donated).trace(*placed)
            made = traced.lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # Whatever the compiler raises is the table's last column.
        fault = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    else:
        temporaries = made.memory_analysis().temp_size_in_bytes
        fault = breach(program, made)
    seconds = time.monotonic() - started
    return Result(program.name, chip, seconds, temporaries, program.limit, fault)


def devices_of(chip: str) -> list[jax.Device]:
    if chip != H200:
        return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda index: 90
    target = (FOLDER / "h200.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target
    ).devices


def placed_at(structs: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), structs
    )


def breach(program: Program, made: jax.stages.Compiled) -> str:
    """What the compiled program does not keep to, or ''."""
    memory, text = made.memory_analysis(), made.as_text()
    wanted = sum(bytes_of(program.operands[i]) for i in program.donated)
    missing = [name for name in program.kernels if name not in text]
    if memory.temp_size_in_bytes > program.limit:
        return "too many temporaries"
    if memory.alias_size_in_bytes < wanted:
        return f"only {memory.alias_size_in_bytes} of {wanted} bytes in place"
    if missing:
        return f"no kernel {' or '.join(missing)}"
    return "gathers" if "all-gather" in text else ""


def results(name: str) -> Iterator[Result]:
    """One file's programs on all chips, or one script."""
    if name.endswith(("_tpu", "_gpu")):
        chips = CHIPS if name.endswith("_tpu") else (H200,)
        for program in importlib.import_module(f"tests.aot.{name}").programs():
            yield from (compiled(program, chip) for chip in chips)
        return
    started = time.monotonic()
    script = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"], env={**os.environ, "PYTHONPATH": "."}
    )
    fault = f"exit status {script.returncode}" if script.returncode else ""
    yield Result(name, H200, time.monotonic() - started, 0, 0, fault)


def main(names: list[str]) -> int:
    found = [path.stem for path in sorted(FOLDER.glob("*.py"))]
    names = names or [name for name in found if re.search("_(tpu|gpu|triton)$", name)]
    print(f"{'program':52}{'chip':8}{'s':>6}{'temporaries':>14}{'limit':>10}  MiB", flush=True)
    faults = 0
    for name in names:
        for result in results(name):
            faults += bool(result.fault)
            used, limit = result.temporaries / MEBI, result.limit / MEBI
            print(
                f"{result.program:52}{result.chip:8}{result.seconds:6.1f}{used:14.2f}{limit:10.2f}"
                f"  {result.fault or 'ok'}",
                flush=True,
            )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
