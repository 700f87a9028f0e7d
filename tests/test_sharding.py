"""Rules from logical axes to meshes."""

import jax
import pytest
from jax.sharding import PartitionSpec

from rl_jax.sharding import (
    check_divides,
    make_mesh,
    make_trainer_mesh,
    param_shardings,
    replicated,
)


def test_a_mesh_takes_the_first_devices_row_by_row() -> None:
    mesh = make_mesh(jax.devices()[2:], 2, 3)
    assert dict(mesh.shape) == {"data": 2, "tensor": 3}
    assert [d.id for d in mesh.devices.flat] == [2, 3, 4, 5, 6, 7]


def test_too_few_devices() -> None:
    with pytest.raises(ValueError, match="data 3 x tensor 3 needs 9 devices, got 8"):
        make_mesh(jax.devices(), 3, 3)


def test_axes_follow_the_rules_and_unnamed_ones_stay_whole() -> None:
    mesh = make_mesh(jax.devices(), 2, 2)
    axes = {
        "a": ("vocab", "embed"),
        "b": {"c": (None, "heads", None)},
        "d": ("unheard_of",),
        "e": (),
    }
    specs = jax.tree.map(lambda s: s.spec, param_shardings(axes, mesh))
    assert specs == {
        "a": PartitionSpec("tensor", None),
        "b": {"c": PartitionSpec(None, "tensor", None)},
        "d": PartitionSpec(None),
        "e": PartitionSpec(),
    }


def test_rules_can_be_others() -> None:
    mesh = make_mesh(jax.devices(), 2, 2)
    spec = param_shardings(("embed", "mlp"), mesh, {"embed": "data"}).spec
    assert spec == PartitionSpec("data", None)


def test_the_two_programs_cut_experts_and_widths_differently() -> None:
    axes = ("experts", "embed", "expert_mlp")
    trainer = make_trainer_mesh(jax.devices(), fsdp=2, tensor=2, expert=2)
    assert dict(trainer.shape) == {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2, "context": 1}
    assert param_shardings(axes, trainer).spec == PartitionSpec(
        "expert", ("fsdp", "context"), "tensor"
    )
    sampler = make_mesh(jax.devices(), 2, 2)
    assert param_shardings(axes, sampler).spec == PartitionSpec("tensor", None, None)


def test_what_does_not_divide_is_named() -> None:
    mesh = make_trainer_mesh(jax.devices(), data=2, fsdp=2, context=2)
    rows = PartitionSpec(("data", "fsdp"), "context")
    check_divides("tokens", (4, 6), rows, mesh)
    message = r"tokens: 6 of shape \(6, 6\) must be a multiple of the mesh's data = 2 x fsdp = 2"
    with pytest.raises(ValueError, match=message):
        check_divides("tokens", (6, 6), rows, mesh)


def test_replicated_is_whole_everywhere() -> None:
    mesh = make_mesh(jax.devices(), 2, 2)
    assert replicated(mesh).is_fully_replicated
