"""Rules from logical axes to meshes."""

import jax
import pytest
from jax.sharding import PartitionSpec

from rl_jax.sharding import make_mesh, param_shardings, replicated


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


def test_replicated_is_whole_everywhere() -> None:
    mesh = make_mesh(jax.devices(), 2, 2)
    assert replicated(mesh).is_fully_replicated
