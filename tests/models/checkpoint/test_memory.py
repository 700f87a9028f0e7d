"""Placing a large tensor takes no more of the host than one device's part of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from models.checkpoint.safetensors import create
from tests.fakes import checkpoints

ROOT = Path(__file__).parents[3]
ROWS, WIDTH, DEVICES = 131072, 1024, 8
SHARD = ROWS * WIDTH * 4 // DEVICES
PLACED = """
import sys, jax, numpy as np
from pathlib import Path
from models.checkpoint.load import open_checkpoint
from models.checkpoint.place import place
def kilobytes(key):
    text = Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0])
checkpoint = open_checkpoint(Path(sys.argv[1]))
mesh = jax.make_mesh((8,), ("a",))
def put(name, axis):
    own = [None, None]
    own[axis] = "a"
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*own))
    kind = np.dtype(np.float32)
    return jax.block_until_ready(place(checkpoint.source, checkpoint.table[name], sharding, kind))
small = put("blocks/block_0/ffn/up", 0)
for axis in range(2):
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    large = put("embedding", axis)
    assert len({s.device for s in large.addressable_shards}) == 8
    print((kilobytes("VmHWM") - before) * 1024 - large.nbytes)
    del large
"""


def written(path, rows):
    config = checkpoints.LLAMA | {
        "vocab_size": rows, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }  # fmt: skip
    checkpoints.write(path, config, {})
    tensors = [(name, "F32", shape) for name, shape in checkpoints.shapes(config).items()]
    create(path / "model.safetensors", tensors, {})
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An embedding of 537 MB, whose zeros take no disk."""
    return written(tmp_path_factory.mktemp("large") / "in", ROWS)


def told(*command, **place):
    """The numbers that a process of its own prints."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    own = {"env": environment, "capture_output": True, "text": True, "check": True}
    return [
        int(n) for n in subprocess.run([sys.executable, *command], **own, **place).stdout.split()
    ]


def test_the_host_holds_one_part(large):
    """Cut by rows, then by columns."""
    shares = [peak / SHARD for peak in told("-c", PLACED, str(large))]
    assert len(shares) == 2 and max(shares) <= 1.3, shares


BEGUN = """
import os, sys
from pathlib import Path
import jax
from launch import build
from launch.warm_start import first_params
from rl_jax.config.load import load
def kilobytes(key):
    text = Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0])
def begun(path):
    config = load(Path(path))
    model, mesh = build.build_policy(config, 60), build.build_meshes(config).trainer
    return jax.block_until_ready(first_params(config, model, mesh))
begun("small.toml")  # code and threads, which are there once whatever is read
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
params = begun("large.toml")
peak = (kilobytes("VmHWM") - before) * 1024
assert len({s.device for s in params["embedding"].addressable_shards}) == 4
print(peak - sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def test_a_run_begins_with_one_part_on_the_host(large, tmp_path):
    """One quarter of the embedding, what Orbax decodes beside it, and a block to be hashed."""
    for name, path in (("large", large), ("small", written(tmp_path / "in", 256))):
        assert cli.main(["import", str(path), "--out", str(tmp_path / name)]) == 0
        section = (tmp_path / name / "model.toml").read_text()
        (tmp_path / f"{name}.toml").write_text(
            f'name = "x"\n{section}\n[mesh]\ntrainer = {{ fsdp = 4 }}\n[trainer]\n'
            f'rows_per_microbatch = 4\n[warm_start]\nsnapshot = "{name}/0"\n'
        )
    (peak,) = told("-c", BEGUN, cwd=tmp_path)
    part = ROWS * WIDTH * 4 // 4
    assert peak <= 1.3 * part, peak / part
