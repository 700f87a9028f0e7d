"""Compiles Kimi-Linear-48B with a million tokens a row where there is no such chip.

    make test-aot ARGS=kimi_1m            (or, for one program of one kind of chip)
    PYTHONPATH=. AOT/bin/python tests/aot/kimi_1m.py v5p train

Programs are those of a run of configs/kimi_linear_48b_1m.toml, on 256 v5p and on 64 H200: the
trainer's step ("train"; "unit" with each kind of block once, which takes a third of the time) and
the sampler's ("sample") at one token and at each prefill length with a pool that holds a sequence
of a million tokens. Prints seconds, bytes of a device and, in units of a shard of the residual
stream, what a device makes that is larger. Exit status 1 if a program does not compile, needs more
than the chip has, lacks a kernel, or makes something larger than its bound.
"""

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
from jax.experimental import topologies
from jax_triton import triton_lib

from launch import build
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from rl_jax.model import Model
from rl_jax.sharding import Devices, make_mesh, make_trainer_mesh
from tests.aot.h200 import TARGET

CONFIG = Path("configs/kimi_linear_48b_1m.toml")
GIGA = 10**9


class Chip(NamedTuple):
    """A kind of device and what a run on it has beside the configuration."""

    topology: str
    backend: str
    memory: int
    """Bytes of a device."""
    changes: tuple[str, ...]
    kernels: Mapping[str, tuple[str, ...]]
    """That a program of a name must have."""


TRITON = ("triton_kernel_call",)
"""A call does not show its kernel's name."""
PAGES = "write_pages", "attend_pages"
ON_64 = "mesh.trainer.fsdp=2", "mesh.trainer.expert=4", "trainer.rows_per_microbatch=8"
"""A quarter of the devices, which take a quarter of the rows at a time."""
DELTA, SPLASH = ("kda_forward", "kda_backward"), ("splash_mha_fwd", "splash_mha_dkv")
PALLAS = {
    "unit": DELTA + SPLASH,
    "train": DELTA + SPLASH,
    "decode": ("kda_decode", *PAGES),
    "prefill": ("kda_forward", *PAGES),
}
CHIPS = {
    "v5p": Chip("v5p:8x8x4", "tpu", 95 * GIGA, (), PALLAS),
    "h200": Chip("8x1x8", "gpu", 141 * GIGA, ON_64, dict.fromkeys(PALLAS, TRITON)),
}
UNIT = (
    'model.layers=["kda", "kda", "mla"]',
    'model.feed_forward=["dense", "experts", "experts"]',
)
LARGEST = {"unit": 2.0, "train": 6.0}
"""Of what a device makes, in shards of the residual stream: a block's input in float32; of the
whole step the one shard that each of six blocks keeps, which the scan over them stacks."""
TEMPORARIES = {"decode": 50, "prefill 64": 250, "prefill 4096": 550}
"""Megabytes of a device: a pool, of which nothing may be copied, has 17 GB."""

SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
SIZES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8}
NO_MEMORY = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional"}
"""Instructions whose result lies where another put it."""


def devices_of(chip: Chip) -> Devices:
    if chip.backend == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    triton_lib.triton_kernel_call_lib.get_compute_capability = lambda index: 90
    return topologies.get_topology_desc(
        platform="cuda", topology=chip.topology, target_config=TARGET
    ).devices


def train(config: RunConfig, model: Model, devices: Devices) -> Iterator[tuple[str, int, object]]:
    """(name or '', tokens of a device, program)."""
    mesh = make_trainer_mesh(devices, **config.mesh.trainer.model_dump())
    options, shape = build.step_options(config, model), build.rl_shape(config)
    loss, optimizer = build.build_loss(config), build.build_optimizer(config)
    made = build.compile_step(model, loss, optimizer, mesh, shape, options=options)
    tensor = config.mesh.trainer.tensor
    yield "", shape.rows * shape.row_length * tensor // mesh.size, made.step


def sample(config: RunConfig, model: Model, devices: Devices) -> Iterator[tuple[str, int, object]]:
    own = config.sampler
    mesh = make_mesh(devices, **config.mesh.sampler.model_dump())
    made = build.compile_sampler(config, model, mesh)
    for tokens, step in made.steps.items():
        if tokens == 1:
            yield "decode", own.slots // config.mesh.sampler.data, step
        else:
            rows = own.prefill_rows // config.mesh.sampler.data
            yield f"prefill {tokens}", rows * tokens, step


def arrays(text: str) -> dict[str, tuple[int, str]]:
    """Type and shape of every array that a program makes -> bytes, an instruction that makes it."""
    fused = set(re.findall(r"calls=%?([\w.\-]+)", text))
    found, computation = {}, ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = begins[1]
        made = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?[)}\]]) ([a-z][\w\-]*)\(", line)
        if not made or computation in fused or made[2] in NO_MEMORY:
            continue
        where = re.search(r'op_name="([^"]*)"', line)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", made[1]):
            size = SIZES.get(dtype, 0) * prod(int(n) for n in sizes.split(",") if n)
            found.setdefault(f"{dtype}[{sizes}]", (size, where[1][-90:] if where else made[2]))
    return found


def report(chip: Chip, name: str, tokens: int, width: int, made) -> str:
    """Prints a program's numbers; what it does not keep to, or ''."""
    memory, text = made.memory_analysis(), made.as_text()
    kernels = chip.kernels[name.split()[0]]
    kept = memory.argument_size_in_bytes
    grown = memory.output_size_in_bytes - memory.alias_size_in_bytes
    used, unit = kept + grown + memory.temp_size_in_bytes, tokens * width * 2
    print(
        f"  {name}: {used / GIGA:.1f} GB a device ({kept / GIGA:.1f} held, "
        f"{memory.temp_size_in_bytes / GIGA:.2f} temporaries) of {chip.memory / GIGA:.0f}; a shard "
        f"of the residual stream has {unit / 2**20:.1f} MiB"
    )
    sizes = defaultdict(list)
    for shape, (size, where) in arrays(text).items():
        sizes[size].append((shape, where))
    # What is larger than all temporaries lies where an argument or a result does, as the pool.
    most = memory.temp_size_in_bytes
    larger = sorted((size for size in sizes if unit < size <= most), reverse=True)
    for size in larger[:12]:
        shape, where = sizes[size][0]
        others = f" and {len(sizes[size]) - 1} shapes" if len(sizes[size]) > 1 else ""
        print(f"    {size / unit:6.2f} x {size / 2**20:9.1f} MiB {shape}{others}: {where}")
    print("    kernels: " + ", ".join(f"{name} x {text.count(name)}" for name in kernels))
    missing = [name for name in kernels if name not in text]
    if missing:
        return f"no kernel {' or '.join(missing)}"
    if used > chip.memory:
        return f"{used / GIGA:.1f} GB exceed the chip's {chip.memory / GIGA:.0f}"
    if name in TEMPORARIES:
        return "too many temporaries" if most > TEMPORARIES[name] * 10**6 else ""
    return "an array above its bound" if larger and larger[0] > LARGEST[name] * unit else ""


def main(chips: list[str], programs: list[str]) -> int:
    faults = 0
    for name in chips or CHIPS:
        chip = CHIPS[name]
        for program in programs or ("sample", "unit", "train"):
            config = load(CONFIG, chip.changes + (UNIT if program == "unit" else ()))
            model = build.build_policy(config, config.model.vocab_size or 0)
            compiling = sample if program == "sample" else train
            print(f"{name}, {program}", flush=True)
            started = time.monotonic()
            with mock.patch.object(jax, "default_backend", lambda own=chip.backend: own):
                found = list(compiling(config, model, devices_of(chip)))
            print(f"  compiled in {time.monotonic() - started:.0f} s", flush=True)
            for which, tokens, made in found:
                fault = report(chip, which or program, tokens, config.model.width, made)
                print(f"    {fault or 'ok'}", flush=True)
                faults += bool(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    names = sys.argv[1:]
    sys.exit(main([n for n in names if n in CHIPS], [n for n in names if n not in CHIPS]))
