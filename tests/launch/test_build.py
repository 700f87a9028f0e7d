"""From configuration to values: imports, meshes, placement of the trainer's state."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from launch import build
from rl_jax.advantages import group_mean, standardised
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.losses.types import Scores, Terms
from rl_jax.sharding import make_mesh
from rl_jax.trainer.batches import Shape
from rl_jax.trainer.state import adam, init_state


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "test", **sections})


def test_imports_from_a_package() -> None:
    assert build.imported("rl_jax.advantages:group_mean", "advantage.name") is group_mean


def test_imports_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "json.py"  # must not get in the way of the module of that name
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Mine:\n"
        "    size: int = 3\n"
    )
    assert build.imported(f"{file}:Mine", "task.name")().size == 3
    import json

    assert json.loads("[1]") == [1]


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for value in ("1", "22"):
        file.write_text(f"own = {value}\n")
        assert build.imported(f"{file}:own", "task.name") == int(value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_package:thing", "No module named 'no_such_package'"),
        ("rl_jax.no_such_module:thing", "No module named 'rl_jax.no_such_module'"),
        ("rl_jax.advantages:no_such_thing", "has no attribute 'no_such_thing'"),
        ("rl_jax.advantages", "has no attribute ''"),
        ("{folder}/missing.py:thing", "No such file or directory"),
        ("{folder}/broken.py:thing", "invalid syntax"),
        ("{folder}/imports.py:thing", "No module named 'no_such_package'"),
        ("{folder}/empty.py:thing", "has no attribute 'thing'"),
        ("{folder}/folder.py:thing", "Is a directory"),
    ],
)
def test_what_cannot_be_imported_is_the_users_error(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "broken.py").write_text("def :\n")
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "folder.py").mkdir()
    name = name.format(folder=tmp_path)
    with pytest.raises(UserError) as caught:
        build.imported(name, "task.name")
    said = str(caught.value)
    assert said.startswith(f"task.name = {name!r} cannot be imported: ")
    assert why in said
    assert "\n" not in said


def test_an_unknown_task_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"task\.name = .no_such_package:family. cannot"):
        build.build_task(config(task={"name": "no_such_package:family"}))


def test_meshes_are_disjoint_trainer_first() -> None:
    meshes = build.build_meshes(
        config(mesh={"trainer": {"data": 1, "tensor": 2}, "sampler": {"data": 2, "tensor": 1}})
    )
    assert [d.id for d in meshes.trainer.devices.flat] == [0, 1]
    assert [d.id for d in meshes.sampler.devices.flat] == [2, 3]
    assert meshes.trainer.devices.shape == (1, 2)
    assert meshes.sampler.devices.shape == (2, 1)


def test_the_vocabulary_is_padded_to_a_multiple_of_64() -> None:
    assert build.build_policy(config(), 65).vocab_size == 128
    assert build.build_policy(config(), 64).vocab_size == 64


def test_choices_become_functions() -> None:
    assert build.build_advantage(config(advantage={"name": "group_mean"})) is group_mean
    assert build.build_advantage(config(advantage={"name": "standardised"})) is standardised


def test_the_band_of_the_loss_is_the_configurations() -> None:
    transform = build.build_loss(config(loss={"eps_low": 0.1, "eps_high": 0.2})).transform
    ratios = jnp.log(jnp.array([[0.89, 0.91, 1.19, 1.21]]))
    zeros = jnp.zeros_like(ratios)
    scores = Scores(ratios, zeros, ratios > -9, zeros, zeros.astype(int))
    terms, _ = transform.apply(scores, Terms(zeros, zeros + 1, zeros), (), transform.init())
    assert (terms.factor[0] > 0).tolist() == [False, True, True, False]


def test_the_optimizer_is_the_configurations() -> None:
    own = build.build_optimizer(
        config(trainer={"learning_rate": 0.5, "lr_warmup_updates": 2, "reset_at_push": False})
    )
    assert [float(own.learning_rate(jnp.int32(n))) for n in (0, 1, 2)] == [0.25, 0.5, 0.5]
    assert not own.reset_at_push


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
        lambda p: init_state({"policy": p}, optimizers, {"w": jnp.zeros(3)}), params
    )
    placed = build.state_shardings(state, params, mesh)
    want = {"w": cut, "scale": half, "in": {"scale": whole}}
    assert placed.params == {"policy": want}
    moments = [
        s for s in jax.tree.leaves(placed.optimizer, is_leaf=lambda s: s == want) if s == want
    ]
    assert len(moments) == 2  # first and second
    assert placed.step.is_fully_replicated
    assert placed.loss["w"].is_fully_replicated  # a parameter's name, not its shape
    counts = [s for s in jax.tree.leaves(placed.optimizer) if s.spec == PartitionSpec()]
    assert len(counts) == 2 + 1  # both moments of the inner scale, and the count


@pytest.mark.parametrize(
    ("vocabulary", "chunk"), [(64, 64), (4096, 4096), (8192, 4096), (4160, 2080)]
)
def test_the_vocabulary_is_cut_into_equal_chunks_of_at_most_4096(
    vocabulary: int, chunk: int
) -> None:
    model = build.build_policy(config(), vocabulary)
    assert build._vocab_chunk(model) == chunk


def test_the_configurations_own_task_is_there() -> None:
    assert re.fullmatch(r"[\w.]+:\w+", build.TASKS["lookup"])
    assert callable(build.imported(build.TASKS["lookup"], "task.name"))
