"""What is wrong with a checkpoint is one line that names the file and the tensor or key."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models.checkpoint.layout import CheckpointError
from models.checkpoint.load import open_checkpoint
from models.checkpoint.place import shard_of
from models.checkpoint.safetensors import create, read_header
from models.kimi_linear import convert as kimi_linear
from models.llama.convert import read_config
from tests.fakes import checkpoints

DEEP = "[" * 200_000
VALUES = checkpoints.values(checkpoints.LLAMA)


def refusal(call, *given) -> str:
    with pytest.raises(CheckpointError) as told:
        call(*given)
    assert "\n" not in str(told.value)
    return str(told.value)


def headed(path: Path, changes: dict, behind: int = 0) -> Path:
    """Two tensors of 4 and 2 numbers, their entries changed; 24 bytes of data and `behind`."""
    create(path, [("a", "F32", (4,)), ("b", "F32", (2,))], {})
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    table = json.loads(whole[8 : 8 + length])
    for name, change in changes.items():
        table[name] = table.get(name, {}) | change if isinstance(change, dict) else change
    text = json.dumps(table).ljust(256).encode()
    path.write_bytes((256).to_bytes(8, "little") + text + whole[8 + length :] + b"x" * behind)
    return path


OFFSETS = "data_offsets needs two integers, each at least 0"
SHAPE = "shape needs a list of integers, each at least 0"
HEADERS = {
    "negative": ({"b": {"data_offsets": [-8, 0]}}, f"b: {OFFSETS}"),
    "three": ({"b": {"data_offsets": [16, 20, 24]}}, f"b: {OFFSETS}"),
    "float offsets": ({"b": {"data_offsets": [16.0, 24.0]}}, f"b: {OFFSETS}"),
    "true": ({"b": {"data_offsets": [False, 8]}}, f"b: {OFFSETS}"),
    "no entry": ({"b": 3}, "b: dtype needs a string"),
    "dtype": ({"b": {"dtype": ["F32"]}}, "b: dtype needs a string"),
    "float shape": ({"b": {"shape": [2.0]}}, f"b: {SHAPE}"),
    "negative shape": ({"b": {"shape": [-1, -2]}}, f"b: {SHAPE}"),
    "same bytes": (
        {"b": {"data_offsets": [0, 8]}},
        "a is at bytes 264 to 280, the tensor before it ends at 272",
    ),
    "a hole": (
        {"a": {"shape": [3], "data_offsets": [0, 12]}},
        "b is at bytes 280 to 288, the tensor before it ends at 276",
    ),
    "backwards": (
        {"b": {"dtype": "F8", "data_offsets": [16, 8]}},
        "b is at bytes 280 to 272, the tensor before it ends at 280",
    ),
    "metadata": ({"__metadata__": [1]}, "__metadata__ needs a map of strings"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__ needs a map of strings"),
}


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_a_wrong_header(tmp_path, name):
    changes, said = HEADERS[name]
    path = headed(tmp_path / "m.safetensors", changes)
    assert refusal(read_header, path) == f"{path}: {said}"


def test_tensors_fill_the_file(tmp_path):
    path = headed(tmp_path / "m.safetensors", {})
    assert read_header(path).offsets == {"a": 264, "b": 280}
    path = headed(tmp_path / "m.safetensors", {}, behind=5)
    assert refusal(read_header, path) == f"{path}: 5 bytes are behind its last tensor"


def test_nesting_without_end(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    assert refusal(read_header, path).startswith(f"{path}: its header is not JSON (")
    made = checkpoints.write(tmp_path / "in", checkpoints.LLAMA, {})
    (made / "config.json").write_text(DEEP)
    assert refusal(open_checkpoint, made).startswith(f"{made}/config.json: not JSON (")


LINEAR = checkpoints.KIMI["linear_attn_config"]
CONFIGS = {
    "dense": ({"first_k_dense_replace": "x"}, 'first_k_dense_replace = "x": needs an integer, at '
              "least 0"),
    "shared": ({"num_shared_experts": "x"}, 'num_shared_experts = "x": needs an integer, at least '
               "0"),
    "fewer": ({"num_shared_experts": -1}, "num_shared_experts = -1: needs an integer, at least 0"),
    "many": ({"num_hidden_layers": 10**400}, f"num_hidden_layers = 1{'0' * 56}...: needs an "
             "integer, at most 10000"),
    "scale": ({"routed_scaling_factor": 10**400}, f"routed_scaling_factor = 1{'0' * 56}...: needs "
              "a number above 0, at most 1e+30"),
    "types": (
        {"layer_types": [["a"]] * 3, "linear_attn_config": LINEAR | {"kda_layers": [],
         "full_attn_layers": []}},
        "layer_types: ['a'] is not built here; there is linear_attention, full_attention",
    ),
    "no bound": (
        {"linear_attn_config": LINEAR | {"safe_gate": True}},
        "linear_attn_config.gate_lower_bound is missing: safe_gate = true needs it, a number in "
        "[-5, 0)",
    ),
    "bound": (
        {"linear_attn_config": LINEAR | {"gate_lower_bound": True}},
        "linear_attn_config.gate_lower_bound = True: needs a number in [-5, 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_wrong_configuration(tmp_path, name):
    changes, said = CONFIGS[name]
    path = checkpoints.write(tmp_path / "in", checkpoints.KIMI | changes, {})
    assert refusal(open_checkpoint, path) == f"{path}/config.json: {said}"


@pytest.mark.parametrize(("chosen", "renormalised"), [(1, False), (2, True)])
def test_a_single_choice_keeps_the_routers_weight(chosen, renormalised):
    """As the released model: renormalised it would be 1, and the router had no slope."""
    table = {**checkpoints.KIMI, "num_experts_per_token": chosen, "moe_renormalize": True}
    assert kimi_linear.read_config(table).renormalise is renormalised


def test_a_missing_epsilon_is_that_of_the_released_model():
    table = {name: value for name, value in checkpoints.KIMI.items() if name != "rms_norm_eps"}
    assert kimi_linear.read_config(table).rms_eps == 1e-6


def test_a_file_has_its_blocks_before_it_is_written_to(tmp_path):
    """Who writes to a mapped page that the disk has no block for is killed by the system."""
    create(path := tmp_path / "x.safetensors", [("a", "F32", (256, 1024))], {})
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 1 << 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model": {"vocab": {"a": "b"}}}', 'token "a" has the id "b": needs an integer, at '
         "least 0"),
        ('{"model": {"vocab": {}}, "added_tokens": [{"id": -7, "content": "é"}]}', 'token "é" has '
         "the id -7: needs an integer, at least 0"),
        (DEEP, "not a tokenizer (RecursionError("),
    ],
)  # fmt: skip
def test_a_wrong_tokenizer(tmp_path, text, said):
    path = checkpoints.write(tmp_path / "in", checkpoints.LLAMA, VALUES)
    (path / "tokenizer.json").write_text(text)
    told = refusal(open_checkpoint, path)
    assert told.startswith(f"tokenizer.json beside {path}/config.json: {said}")


@pytest.mark.parametrize("bits", [0x7F81, 0xFFC1, 0x7F80])
def test_numbers_that_are_not_finite(tmp_path, bits):
    norm = VALUES["model.norm.weight"].copy()
    norm.view(np.uint16)[3] = bits
    tensors = VALUES | {"model.norm.weight": norm}
    path = checkpoints.write(tmp_path / "in", checkpoints.LLAMA, tensors)
    checkpoint = open_checkpoint(path)
    leaf, kind = checkpoint.table["norm/scale"], np.dtype(ml_dtypes.bfloat16)
    told = refusal(shard_of, checkpoint.source, leaf, (slice(0, 32),), kind)
    assert told == (f"{path}/model.safetensors: model.norm.weight has numbers that are not finite")


@pytest.mark.parametrize(("given", "kept"), [({}, True), ({"truncate": False}, False)])
def test_bounds_of_yarn_are_rounded_unless_told(given, kept):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read_config(checkpoints.LLAMA | {"rope_scaling": scaling | given})
    assert config.rope_scaling is not None and config.rope_scaling.whole_pairs is kept
