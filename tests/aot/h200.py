"""What both scripts of Triton kernels compile with: an H200 where there is no GPU."""

import re
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from triton.backends import nvidia

TARGET = (Path(__file__).parent / "h200.txtpb").read_text()
ASSEMBLER = Path(nvidia.__file__).parent / "bin" / "ptxas"
SHARED_MEMORY = 227 * 1024
SETTINGS = {"grid", "num_warps", "num_stages", "input_output_aliases"}
"""What a launch is told besides the kernel's own arguments."""


def checked(kinds, dtype, seen, plain, *operands, kernel, out_shape, **options):
    """Calls through where pointers, integers and constants match the kernel's parameters.

    `kinds` has names of parameters by what they are; every other is an operand, of `dtype`.
    """
    kind_of = {name: kind for kind, names in kinds.items() for name in names.split()}
    constants = set(options) - SETTINGS
    given = [*operands, *out_shape]
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(given), (kernel.fn.__name__, names, len(given))
    assert constants <= set(kernel.arg_names), (kernel.fn.__name__, constants)
    for name, value in zip(names, given, strict=True):
        kind = "integer" if isinstance(value, int) else str(value.dtype)
        wanted = kind_of.get(name, str(jnp.dtype(dtype)))
        assert kind == wanted, (kernel.fn.__name__, name, kind, wanted)
    seen.add(kernel.fn.__name__)
    return plain(*operands, kernel=kernel, out_shape=out_shape, **options)


def assembled(plain, limit, *operands, **options):
    """Compiles through and prints what the assembler says; `limit` bytes may spill."""
    result = plain(*operands, **options)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(result.binary)
        command = [ASSEMBLER, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".o")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    print(
        f"  {result.name}: {registers[0]} registers, {spilled[0][0]} / {spilled[0][1]} B spilled "
        f"and reloaded per thread, {result.shared_mem_bytes >> 10} KiB shared",
        flush=True,
    )
    assert int(spilled[0][0]) <= limit, result.name
    assert result.shared_mem_bytes <= SHARED_MEMORY, result.name
    return result


def compiled(function, *structs, **options):
    lowered = jax.jit(function, **options).trace(*structs).lower(lowering_platforms=("cuda",))
    return lowered.compile().memory_analysis()
