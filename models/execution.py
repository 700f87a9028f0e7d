"""[P] How a model's layers are run; the parameters and what they compute stay the same."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rl_jax.arrays import Tree

REMAT = ("none", "block", "dots")
COMPUTE = ("float32", "bfloat16")


@dataclass(frozen=True)
class Execution:
    """The defaults keep every activation and compute in the parameters' own precision."""

    scan: bool = False
    """Train on repeated layers stacked and scanned: fewer bodies to compile, one more copy."""
    remat: str = "none"
    """Activations kept for gradients: "none" keeps all, "block" a block's input alone, "dots" its
    products with weights as well."""
    compute: str = "float32"
    """"float32" or "bfloat16": what weights are cast to and activations are in. Norms, gates,
    softmax, routers, logits and recurrent states stay in float32."""

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("remat", self.remat, REMAT),
            ("compute", self.compute, COMPUTE),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: {value!r} must be one of {', '.join(allowed)}")


def activations(embedding: jax.Array, execution: Execution) -> DTypeLike:
    """The dtype of what layers hand on; in float64 (for checks) that of the parameters."""
    if execution.compute == "bfloat16":
        return jnp.bfloat16
    return jnp.promote_types(embedding.dtype, jnp.float32)


def cast(params: Tree, exact: Tree, execution: Execution) -> Tree:
    """Weights in the compute dtype; leaves where `exact` is true stay as they are.

    Before layers are stacked, so that stack and cast are one copy. In "float32" nothing is cast.
    """
    if execution.compute == "float32":
        return params
    return jax.tree.map(
        lambda leaf, stay: leaf if stay else leaf.astype(execution.compute), params, exact
    )
