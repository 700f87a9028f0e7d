"""From configuration to values: meshes, sizes, placement of the trainer's state."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from launch import build, compose
from models.kimi_linear.config import kimi_linear_48b
from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from rl_jax.sharding import make_mesh
from rl_jax.tasks.lookup.data import TOKENIZER_DIRECTORY
from rl_jax.trainer.batches import Shape
from rl_jax.trainer.state import adam, init_state


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "test", **sections})


def test_an_unknown_task_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"task\.name = .no_such_package:family. cannot"):
        build.build_task(config(task={"name": "no_such_package:family"}))


def test_a_task_in_words_needs_the_policys_tokenizer() -> None:
    with pytest.raises(UserError, match=r"task\.tokenizer: the task arithmetic has none of"):
        build.build_renderer(build.build_task(config(task={"name": "arithmetic"})))
    named = {"name": "arithmetic", "tokenizer": str(TOKENIZER_DIRECTORY)}
    renderer = build.build_renderer(build.build_task(config(task=named)))
    assert renderer.vocab_size == 384
    named["tokenizer"] = "nowhere"
    with pytest.raises(UserError, match=r"tokenizer of the task: nowhere/tokenizer.json does not"):
        build.build_renderer(build.build_task(config(task=named)))


def test_meshes_are_disjoint_trainer_first() -> None:
    meshes = build.build_meshes(
        config(mesh={"trainer": {"data": 1, "tensor": 2}, "sampler": {"data": 2, "tensor": 1}})
    )
    assert [d.id for d in meshes.trainer.devices.flat] == [0, 1]
    assert [d.id for d in meshes.sampler.devices.flat] == [2, 3]
    assert meshes.trainer.devices.shape == (1, 1, 2, 1, 1)
    assert meshes.sampler.devices.shape == (2, 1)


def test_the_vocabulary_is_padded_to_a_multiple_of_64() -> None:
    assert build.build_policy(config(), 65).vocab_size == 128
    assert build.build_policy(config(), 64).vocab_size == 64


def test_a_policy_of_the_llama_kind_is_the_configurations() -> None:
    scaling = {"kind": "linear", "factor": 2.0}
    own = {"family": "llama", "layers": 3, "kv_heads": 2, "head_dim": 16, "qk_norm": True}
    own |= {"rope_scaling": scaling, "tied": False, "width": 48, "ffn": 40, "compute": "bfloat16"}
    model = build.build_policy(config(model=own), 65)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert model.vocab_size == 128 and shapes["head"].shape == (128, 48)
    assert sorted(shapes["blocks"]) == ["block_0", "block_1", "block_2"]
    block = shapes["blocks"]["block_2"]
    assert block["attention"]["key"].shape == (48, 2, 16)
    assert block["attention"]["query_norm"]["scale"].shape == (16,)
    assert block["ffn"]["up"].shape == (48, 40)
    row = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    assert jax.eval_shape(model.forward, shapes, row, row, row).dtype == jnp.bfloat16


def test_the_optimizer_is_the_configurations() -> None:
    own = build.build_optimizer(
        config(trainer={"learning_rate": 0.5, "lr_warmup_updates": 2, "reset_at_push": False})
    )
    assert [float(own.learning_rate(jnp.int32(n))) for n in (0, 1, 2)] == [0.25, 0.5, 0.5]
    assert not own.reset_at_push


def test_the_policy_rests_while_a_critic_warms_up() -> None:
    """Its own warm-up and its fall are counted as without a critic, from where it begins."""
    trainer = {"learning_rate": 0.5, "lr_warmup_updates": 2, "updates": 10, "lr_final_share": 0.0}
    own = build.build_optimizer(config(trainer=trainer, critic={"warmup_updates": 3}))
    rates = [float(own.learning_rate(jnp.int32(n))) for n in range(6)]
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.25 * 0.7, 0.5 * 0.6, 0.5 * 0.5])


def test_a_critic_is_the_configurations() -> None:
    assert build.build_critic(config()) is None
    own = build.build_critic(
        config(critic={"learning_rate": 0.25, "updates_per_step": 3, "frozen": ["trunk.a*"]})
    )
    assert own is not None
    rates = [float(own.optimizer.learning_rate(jnp.int32(n))) for n in (0, 99)]
    assert rates == [0.25, 0.25], "it does not wait for itself"
    assert own.optimizer.updates_per_step == 3
    assert own.optimizer.frozen == ("trunk.a*", *build.ROUTER_BIASES)
    assert own.loss.transform.needs == {"value"}


def test_a_batch_has_room_for_the_longest_members() -> None:
    own = config(
        trainer={"groups": 3, "group_size": 5, "row_length": 256, "rows_per_microbatch": 4},
        sampler={"max_context": 128},
    )
    assert build.rl_shape(own) == Shape(2, 4, 256)  # 15 members, two to a row


def test_moments_lie_beside_their_parameters() -> None:
    mesh = make_mesh(jax.devices(), 2, 2)
    cut, half, whole = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data", "tensor"), ("tensor",), ())
    )

    def leaf(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    # The inner `scale` has the name of the outer one and another place.
    params = {"w": leaf((4, 8), cut), "scale": leaf((8,), half), "in": {"scale": leaf((8,), whole)}}
    optimizers = {"policy": adam(1e-3)}
    state = jax.eval_shape(
        lambda p: init_state({"policy": p}, optimizers, {"policy": {"w": jnp.zeros(3)}}), params
    )
    placed = build.state_shardings(state, params, mesh)
    want = {"w": cut, "scale": half, "in": {"scale": whole}}
    assert placed.params == {"policy": want}
    moments = [
        s for s in jax.tree.leaves(placed.optimizer, is_leaf=lambda s: s == want) if s == want
    ]
    assert len(moments) == 2  # first and second
    assert placed.step.is_fully_replicated
    assert placed.loss["policy"]["w"].is_fully_replicated  # a parameter's name, not its shape
    counts = [s for s in jax.tree.leaves(placed.optimizer) if s.spec == PartitionSpec()]
    assert len(counts) == 2 + 1  # both moments of the inner scale, and the count


@pytest.mark.parametrize(
    ("vocabulary", "chunk"), [(64, 64), (4096, 4096), (8192, 4096), (4160, 2080)]
)
def test_the_vocabulary_is_cut_into_equal_chunks_of_at_most_4096(
    vocabulary: int, chunk: int
) -> None:
    model = build.build_policy(config(), vocabulary)
    assert build.vocab_chunk(model) == chunk


def test_the_configurations_own_task_is_there() -> None:
    assert re.fullmatch(r"[\w.]+:\w+", build.TASKS["lookup"])
    assert callable(compose.imported(build.TASKS["lookup"], "task.name"))


def test_the_48b_configuration_is_the_released_models() -> None:
    own = load(Path("configs/kimi_linear_48b.toml"))
    assert build.policy_config(own, 163840) == kimi_linear_48b()
