"""[P] From logical axes to shardings: one table of rules per mesh."""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.arrays import Array, Tree

DATA, TENSOR = "data", "tensor"
"""Mesh axes of both programs."""

RULES: Mapping[str, str | None] = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
    "latent": None,
}
"""Where each logical axis of a parameter goes; an axis that is not named is not cut."""


def make_mesh(
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]  # jax assigns it
    data: int,
    tensor: int,
) -> Mesh:
    """A (data, tensor) mesh over the first data * tensor of `devices`."""
    need = data * tensor
    if len(devices) < need:
        raise ValueError(
            f"a mesh of data {data} x tensor {tensor} needs {need} devices, got {len(devices)}"
        )
    return Mesh(np.asarray(devices[:need]).reshape(data, tensor), (DATA, TENSOR))


def param_shardings(axes: Tree, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Tree:
    """The tree of NamedShardings for a tree of tuples of logical axis names."""

    def one(names: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(rules.get(n) if n else None for n in names)))

    return jax.tree.map(one, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of small things that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def on_each_device(
    function: Callable[..., tuple[Array, ...]],
    operands: Mapping[str, PartitionSpec],
    results: Sequence[PartitionSpec],
) -> Callable[..., tuple[Array, ...]]:
    """`function` on each device's own part, where XLA cannot cut what is inside (a kernel).

    `operands` names the arguments, in order. The mesh is that of `jax.set_mesh`; without one, or
    inside another `shard_map`, `function` is called as it is. Axes of a mesh that `operands` do not
    name hold the whole. ValueError where an axis of an operand does not divide over the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return function
    cut = jax.shard_map(
        function, in_specs=tuple(operands.values()), out_specs=tuple(results), check_vma=False
    )

    def run(*given: Array) -> tuple[Array, ...]:
        for (name, spec), x in zip(operands.items(), given, strict=True):
            for size, axis in zip(x.shape, spec, strict=False):
                if axis and size % mesh.shape[axis]:
                    raise ValueError(
                        f"{name}: {size} of shape {x.shape} must be a multiple of the mesh's "
                        f"{axis} = {mesh.shape[axis]}"
                    )
        return cut(*given)

    return run
