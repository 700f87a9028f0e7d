"""[P] From logical axes to shardings: the axes of both programs' meshes, a table of rules for each.

Trainer: rows of a batch lie over (data, fsdp, expert), the tokens of a row over context. `tensor`
cuts heads and hidden widths, `expert` experts, `fsdp` and `context` what is left of a parameter.
Sampler: requests lie over data, heads and experts over tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rl_jax.arrays import Array, Tree

DATA, FSDP, TENSOR, EXPERT, CONTEXT = "data", "fsdp", "tensor", "expert", "context"
SAMPLER_AXES = DATA, TENSOR
TRAINER_AXES = DATA, FSDP, TENSOR, EXPERT, CONTEXT

ROWS = DATA, FSDP, EXPERT
"""Mesh axes that cut rows, as an entry of a PartitionSpec."""
SHARDS = FSDP, CONTEXT
"""Mesh axes over which a parameter is gathered where it is used: they cut a model's width."""

Devices = Sequence[jax.Device]
Rules = Mapping[str, str | tuple[str, ...]]
"""The mesh axes of each logical axis; one that is not named, or a mesh lacks, is not cut."""

TRAINER_RULES: Rules = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "expert_mlp": TENSOR,
    "experts": EXPERT,
    "embed": SHARDS,
}
SAMPLER_RULES: Rules = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "experts": TENSOR,
}


def make_mesh(
    devices: Devices,
    data: int,
    tensor: int,
) -> Mesh:
    """A (data, tensor) mesh over the first data * tensor of `devices`."""
    return _mesh(devices, {DATA: data, TENSOR: tensor})


def make_trainer_mesh(
    devices: Devices,
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
) -> Mesh:
    """A mesh of all five axes over the first of `devices`, neighbours along `context` first."""
    sizes = data, fsdp, tensor, expert, context
    return _mesh(devices, dict(zip(TRAINER_AXES, sizes, strict=True)))


def _mesh(devices: Devices, sizes: Mapping[str, int]) -> Mesh:
    need = prod(sizes.values())
    if len(devices) < need:
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"a mesh of {named} needs {need} devices, got {len(devices)}")
    return Mesh(np.asarray(devices[:need]).reshape(*sizes.values()), tuple(sizes))


def known(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """`spec` without the axes that `mesh` lacks."""

    def one(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(axes, tuple):
            return tuple(axis for axis in axes if axis in mesh.shape) or None
        return axes if axes in mesh.shape else None

    return PartitionSpec(*map(one, spec))


def param_shardings(axes: Tree, mesh: Mesh | AbstractMesh, rules: Rules | None = None) -> Tree:
    """The tree of NamedShardings for a tree of tuples of logical axis names.

    Without `rules` those of the trainer where `mesh` has its axes, else those of the sampler.
    """
    specs = _specs(axes, mesh, rules)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def param_specs(axes: Tree) -> Tree:
    """The PartitionSpecs of `param_shardings` on the mesh of `jax.set_mesh`."""
    return _specs(axes, jax.sharding.get_abstract_mesh(), None)


def _specs(axes: Tree, mesh: Mesh | AbstractMesh, rules: Rules | None) -> Tree:
    if rules is None:
        rules = TRAINER_RULES if EXPERT in mesh.shape else SAMPLER_RULES

    def one(names: tuple[str | None, ...]) -> PartitionSpec:
        return known(PartitionSpec(*(rules.get(n) if n else None for n in names)), mesh)

    return jax.tree.map(one, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of small things that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def whole_of(leaf: jax.Array) -> jax.Array:
    """A global array with all of it in every process; a collective where it is not there yet."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    assert isinstance(leaf.sharding, NamedSharding), "every global array here lies on a mesh"
    return jax.device_put(leaf, replicated(leaf.sharding.mesh))


def check_divides(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """ValueError naming the array and the axes where a dimension does not divide over the mesh."""
    for size, axes in zip(shape, spec, strict=False):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        if size % prod(mesh.shape[axis] for axis in axes):
            cut = " x ".join(f"{axis} = {mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"{name}: {size} of shape {shape} must be a multiple of the mesh's {cut}"
            )


def on_each_device(
    function: Callable[..., tuple[Array, ...]],
    operands: Mapping[str, PartitionSpec],
    results: Sequence[PartitionSpec],
) -> Callable[..., tuple[Array, ...]]:
    """`function` on each device's own part, where XLA cannot cut what is inside (a kernel).

    `operands` names the arguments, in order. The mesh is that of `jax.set_mesh`; without one, on
    one of a single device, or inside another `shard_map`, `function` is called as it is. Axes of a
    mesh that `operands` do not name hold the whole, axes that the mesh lacks cut nothing.
    ValueError where an axis of an operand does not divide over the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return function
    given_specs = {name: known(spec, mesh) for name, spec in operands.items()}
    cut = jax.shard_map(
        function,
        in_specs=tuple(given_specs.values()),
        out_specs=tuple(known(spec, mesh) for spec in results),
        check_vma=False,
    )

    def run(*given: Array) -> tuple[Array, ...]:
        for (name, spec), x in zip(given_specs.items(), given, strict=True):
            check_divides(name, x.shape, spec, mesh)
        return cut(*given)

    return run


def degree(*axes: str) -> int:
    """Over how many devices `axes` of the mesh of `jax.set_mesh` cut what is not cut yet.

    1 without a mesh, on one that lacks the axes, and inside `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return 1
    return prod(mesh.shape.get(axis, 1) for axis in axes)
