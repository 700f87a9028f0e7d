"""Compiles Kimi-Linear-48B with a million tokens a row where there is no such chip.

    make test-aot ARGS=kimi_1m            (or, for one program of one kind of chip)
    PYTHONPATH=. AOT/bin/python tests/aot/kimi_1m.py v5p train

Programs are those of a run of configs/kimi_linear_48b_1m.toml, on 256 v5p and on 64 H200: the
trainer's step ("train"; "unit" with each kind of block once), the sampler's ("sample") at one token
and at each prefill length with a pool that holds a sequence of a million tokens, and what mixes a
layer's tokens ("mixers"), forward and backward, on the trainer's whole mesh. Prints
seconds, bytes of a device and, in units of a shard of the residual stream, what a device makes that
is larger. Exit status 1 if a program does not compile, needs more than the chip has, lacks a
kernel, or makes something larger than its bound.
"""

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jax_triton import triton_lib

from launch import build
from rl_jax.arrays import CHUNK
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.mla import api as mla
from rl_jax.model import Model
from rl_jax.sharding import CONTEXT, ROWS, TENSOR, Devices, make_mesh, make_trainer_mesh
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
ON_64 = (
    "mesh.trainer.fsdp=1",
    "mesh.trainer.tensor=2",
    "mesh.trainer.context=4",
    "trainer.rows_per_microbatch=8",
    'trainer.param_dtype="bfloat16"',
    "trainer.masters=false",
    'trainer.moment_dtype="bfloat16"',
)
"""A quarter of the devices: parameters and moments in bfloat16, heads and experts' width in two."""
DELTA, SPLASH = ("kda_forward", "kda_backward"), ("splash_mha_fwd", "splash_mha_dkv")
PALLAS = {
    "train": DELTA + SPLASH,
    "kda": DELTA,
    "mla": SPLASH,
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
LARGEST = {"train": 6.0, "decode": 1.0, "prefill": 6.0, "kda": 7.2, "mla": 2.7}
"""Of what a device makes, in shards of the residual stream."""

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
    """(name, tokens of a device, program)."""
    mesh = make_trainer_mesh(devices, **config.mesh.trainer.model_dump())
    options, shape = build.step_options(config, model), build.rl_shape(config)
    loss, optimizer = build.build_loss(config), build.build_optimizer(config)
    made = build.compile_step(model, loss, optimizer, mesh, shape, options=options)
    tensor = config.mesh.trainer.tensor
    yield "train", shape.rows * shape.row_length * tensor // mesh.size, made.step


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


def mixers(config: RunConfig, model: Model, devices: Devices) -> Iterator[tuple[str, int, object]]:
    """Outputs and all gradients of a layer's heads, for one microbatch."""
    mesh = make_trainer_mesh(devices, **config.mesh.trainer.model_dump())
    rows, length = config.trainer.rows_per_microbatch, config.trainer.row_length
    heads, width, tensor = config.model.heads, config.model.head_dim, config.mesh.trainer.tensor
    tokens, by_head = PartitionSpec(ROWS, CONTEXT), PartitionSpec(ROWS, CONTEXT, TENSOR)

    def struct(dtype: DTypeLike, *shape: int, length: int = length) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, by_head if shape else tokens)
        return jax.ShapeDtypeStruct((rows, length, *shape), dtype, sharding=sharding)

    def delta(q, k, v, g, beta, cotangent, reset):
        run = partial(kda.chunked, state=None, reset=reset, lower_bound=None)
        out, pull = jax.vjp(lambda *x: run(*x)[0], q, k, v, g, beta)
        return out, pull(cotangent)

    def latent(q, k, v, cotangent, segments):
        run = partial(mla.attend_heads, segments=segments, scale=1.0)
        out, pull = jax.vjp(run, q, k, v)
        return out, pull(cotangent)

    own = partial(struct, jnp.bfloat16, heads)
    gates = struct(jnp.float32, heads, width), struct(jnp.float32, heads)
    resets = struct(jnp.bool_, length=length // CHUNK)
    wide = width + config.model.kv_shared_key
    given = {
        "kda": (delta, (own(width),) * 3 + gates + (own(width), resets)),
        "mla": (latent, (own(wide), own(wide), own(width), own(width), struct(jnp.int32))),
    }
    for name, (run, operands) in given.items():
        with jax.set_mesh(mesh):
            yield name, rows * length * tensor // mesh.size, jax.jit(run).lower(*operands).compile()


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


def report(chip: Chip, name: str, tokens: int, width: int, made, kernels: tuple[str, ...]) -> str:
    """Prints a program's numbers; what it does not keep to, or ''."""
    memory, text = made.memory_analysis(), made.as_text()
    kept = memory.argument_size_in_bytes
    grown = memory.output_size_in_bytes - memory.alias_size_in_bytes
    used, unit = kept + grown + memory.temp_size_in_bytes, tokens * width * 2
    print(
        f"  {name}: {used / GIGA:.1f} GB a device ({kept / GIGA:.1f} held, "
        f"{memory.temp_size_in_bytes / GIGA:.1f} temporaries) of {chip.memory / GIGA:.0f}; a shard "
        f"of the residual stream has {unit / 2**20:.1f} MiB"
    )
    sizes = defaultdict(list)
    for shape, (size, where) in arrays(text).items():
        sizes[size].append((shape, where))
    larger = sorted((size for size in sizes if size > unit), reverse=True)
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
    limit = LARGEST[name.split()[0]] * unit
    return "an array above its bound" if larger and larger[0] > limit else ""


def main(chips: list[str], programs: list[str]) -> int:
    faults = 0
    for name in chips or CHIPS:
        chip = CHIPS[name]
        for program in programs or ("mixers", "sample", "train"):
            config = load(CONFIG, chip.changes + (UNIT if program == "unit" else ()))
            model = build.build_policy(config, config.model.vocab_size or 0)
            compiling = {"sample": sample, "mixers": mixers}.get(program, train)
            print(f"{name}, {program}", flush=True)
            started = time.monotonic()
            with mock.patch.object(jax, "default_backend", lambda own=chip.backend: own):
                found = list(compiling(config, model, devices_of(chip)))
            print(f"  compiled in {time.monotonic() - started:.0f} s", flush=True)
            for which, tokens, made in found:
                kernels = chip.kernels[which.split()[0]]
                fault = report(chip, which, tokens, config.model.width, made, kernels)
                print(f"    {fault or 'ok'}", flush=True)
                faults += bool(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    names = sys.argv[1:]
    sys.exit(main([n for n in names if n in CHIPS], [n for n in names if n not in CHIPS]))
