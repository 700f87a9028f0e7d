"""[H] What a step adds to its arguments on one device, from tracing that device's part of it."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from launch import build
from launch.plan.liveness import fullest
from launch.plan.traced import Weigh
from rl_jax.arrays import Tree
from rl_jax.config.model import KimiLinear, Llama
from rl_jax.config.run import RunConfig
from rl_jax.sharding import CONTEXT, DATA, EXPERT, FSDP, SHARDS, TENSOR, TRAINER_AXES
from rl_jax.trainer.batches import empty_batch
from rl_jax.trainer.state import POLICY
from rl_jax.trainer.step import make_train_step


def temporaries(config: RunConfig, vocab_size: int) -> int:
    """Bytes at the fullest moment of a device's step beside state and batch: gradients, kept and
    recomputed activations, cotangents, copies of the weights.

    The step is traced for the device's own rows, heads, hidden widths and experts, on a mesh that
    cuts nothing but tokens. Gradients and copies of what `fsdp` and `context` cut count with the
    device's part.
    """
    own = on_one_device(config)
    parts = config.mesh.trainer.model_dump()
    sizes = tuple(parts[axis] if axis == CONTEXT else 1 for axis in TRAINER_AXES)
    mesh = AbstractMesh(sizes, TRAINER_AXES, (AxisType.Auto,) * len(sizes))
    policy = build.build_policy(own, vocab_size // parts[TENSOR])
    loss, optimizer = build.build_loss(own), build.build_optimizer(own)
    options = build.step_options(own, policy)
    critic = build.build_critic(own)
    state = build.abstract_state(policy, loss, optimizer, mesh, critic, options.storage)
    step = make_train_step(
        policy,
        loss,
        {POLICY: optimizer},
        vocab_chunk=max(build.vocab_chunk(policy) // parts[TENSOR], 1),
        storage=options.storage,
        experts=options.experts,
    )
    given = _shapes(state), _shapes(empty_batch(build.rl_shape(own), options.choices))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(step)(*given)
    shards = prod(parts[axis] for axis in SHARDS)
    return fullest(
        traced.jaxpr, _weigh(state.params[POLICY], policy.axes(), shards, parts[CONTEXT])
    )


def on_one_device(config: RunConfig) -> RunConfig:
    """The run whose step is that of one of the devices, but for what devices exchange and for the
    tokens of a row, of which all are there."""
    sizes, own = config.mesh.trainer.model_dump(), config.trainer
    rows = own.rows_per_microbatch // prod(sizes[axis] for axis in (DATA, FSDP, EXPERT))
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=_model_parts(config.model, sizes)),
            "trainer": own.model_copy(update={"rows_per_microbatch": rows}),
        }
    )


def _model_parts(model: KimiLinear | Llama, sizes: Mapping[str, int]) -> dict[str, Any]:
    tensor = sizes[TENSOR]
    cut = ("heads", "kv_heads", "mla_heads", "ffn", "expert_width")
    parts: dict[str, Any] = {
        # A single head of keys is on every device.
        name: max(size // tensor, 1)
        for name in cut
        if (size := getattr(model, name, None))
    }
    if model.vocab_size is not None:
        parts["vocab_size"] = model.vocab_size // tensor
    if isinstance(model, KimiLinear) and model.experts:
        # A token has as many choices as ever, if not all of them are here.
        parts["experts"] = max(model.experts // sizes[EXPERT], model.chosen_experts)
    return parts


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _weigh(params: Tree, axes: Tree, shards: int, context: int) -> Weigh:
    """Bytes of a value: what has the shape of a matrix that is cut in `shards`, or of a stack of
    such, is a gradient or copy of it and cut as well; else its tokens are cut over `context`."""
    names = jax.tree.structure(params).flatten_up_to(axes)
    leaves = zip(jax.tree.leaves(params), names, strict=True)
    cut = {leaf.shape for leaf, own in leaves if "embed" in own and leaf.ndim > 1}

    def weigh(value: Any, own: bool) -> int:
        whole = value.size * getattr(value.dtype, "itemsize", 0) if hasattr(value, "shape") else 0
        found = shards > 1 and (value.shape in cut or value.shape[1:] in cut) if whole else False
        return whole if own else whole // (shards if found else context)

    return weigh
