"""Which number of which tensor becomes which number of which parameter."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import kimi_linear, llama
from models.checkpoint.families import family_of
from models.checkpoint.layout import restore, tensors_of
from models.checkpoint.load import load_params, open_checkpoint
from models.checkpoint.place import shard_of
from rl_jax.snapshots.manifest import named_leaves
from tests.fakes import checkpoints

BUILD = {"llama": llama.build_model, "kimi_linear": kimi_linear.build_model}
FLOAT = np.dtype(np.float32)
NAMES = sorted(checkpoints.CONFIGS)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Every kind of checkpoint in float32, and its tensors."""

    def of(name):
        config = checkpoints.CONFIGS[name]
        tensors = checkpoints.values(config, np.float32)
        path = checkpoints.write(tmp_path_factory.mktemp(name) / "in", config, tensors)
        return open_checkpoint(path), tensors

    return {name: of(name) for name in NAMES}


def load(checkpoint):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return load_params(checkpoint, lambda path: device)


@pytest.mark.parametrize("name", NAMES)
def test_tables_name_every_tensor_and_every_parameter(name):
    config = checkpoints.CONFIGS[name]
    family = family_of(config)
    own = family.read_config(config)
    table = family.tensor_table(own)
    assert tensors_of(table) == checkpoints.shapes(config)
    model = BUILD[family.name](own)
    ours = named_leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert {k: leaf.shape for k, leaf in table.items()} == {k: v.shape for k, v in ours.items()}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_hold_every_number_of_every_tensor(opened, name):
    checkpoint, tensors = opened[name]
    params = named_leaves(load(checkpoint))
    back = {name: np.full_like(array, np.nan) for name, array in tensors.items()}
    for path, leaf in checkpoint.table.items():
        for part in leaf.parts:
            restore(part, np.asarray(params[path]), back[part.tensor])
    assert all(np.array_equal(back[n], tensors[n]) for n in tensors)


def test_places_in_a_llama(opened):
    checkpoint, tensors = opened["qwen2"]
    block = load(checkpoint)["blocks"]["block_1"]
    attention, layer = block["attention"], "model.layers.1"
    d, h, k = 5, 1, 3
    rows = tensors[f"{layer}.self_attn.k_proj.weight"]
    assert attention["key"][d, h, k] == rows[h * 8 + k, d]
    assert attention["key_bias"][h, k] == tensors[f"{layer}.self_attn.k_proj.bias"][h * 8 + k]
    assert attention["out"][h, k, d] == tensors[f"{layer}.self_attn.o_proj.weight"][d, h * 8 + k]
    assert block["ffn"]["down"][7, d] == tensors[f"{layer}.mlp.down_proj.weight"][d, 7]


def test_places_in_a_kimi_linear(opened):
    checkpoint, tensors = opened["kimi_linear"]
    blocks = load(checkpoint)["blocks"]
    kda, first = blocks["block_0"]["mixer"], "model.layers.0.self_attn"
    d, h, k, tap = 5, 2, 3, 1
    for i, x in enumerate("qkv"):
        assert kda["qkv"][d, i, h, k] == tensors[f"{first}.{x}_proj.weight"][h * 16 + k, d]
        conv = tensors[f"{first}.{x}_conv1d.weight"]
        assert kda["conv"][tap, i, h, k] == conv[h * 16 + k, 0, tap]
    assert kda["decay_rate_log"][h] == tensors[f"{first}.A_log"][0, 0, h, 0]
    assert kda["decay"]["up"][d, h, k] == tensors[f"{first}.f_b_proj.weight"][h * 16 + k, d]
    assert kda["gate"]["down"][d, k] == tensors[f"{first}.g_a_proj.weight"][k, d]
    mla, up = blocks["block_1"]["mixer"], tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    assert mla["key_up"][1, 11, 4] == up[22 + 11, 4]
    assert mla["value_up"][1, 4, 9] == up[22 + 12 + 9, 4]
    moe, third = blocks["block_2"]["ffn"], "model.layers.2.block_sparse_moe"
    assert moe["gate"][3, d, 7] == tensors[f"{third}.experts.3.w1.weight"][7, d]
    assert moe["up"][3, d, 7] == tensors[f"{third}.experts.3.w3.weight"][7, d]
    assert moe["down"][3, 7, d] == tensors[f"{third}.experts.3.w2.weight"][d, 7]
    assert moe["router"][d, 3] == tensors[f"{third}.gate.weight"][3, d]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_of_a_parameter_is_read_alone(opened, data):
    checkpoint, _ = opened["kimi_linear"]
    leaf = checkpoint.table[data.draw(st.sampled_from(sorted(checkpoint.table)))]
    whole = shard_of(checkpoint.source, leaf, tuple(slice(0, n) for n in leaf.shape), FLOAT)
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in leaf.shape
    ]
    shard = tuple(slice(a, b) for a, b in bounds)
    cut = shard_of(checkpoint.source, leaf, shard, FLOAT)
    assert np.array_equal(cut, whole[shard])


@pytest.mark.parametrize("axes", [(None, "a"), ("a", None), (("a", "b"), None), (None, None)])
def test_a_parameter_on_a_mesh_is_the_same(opened, axes):
    checkpoint, tensors = opened["llama"]
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def of(path):
        return (
            sharding
            if path == "head"
            else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )

    params = load_params(checkpoint, of)
    assert params["head"].sharding == sharding
    assert np.array_equal(params["head"], tensors["lm_head.weight"])
