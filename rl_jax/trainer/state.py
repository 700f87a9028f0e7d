"""[P] The trainer's state: one pytree, donated at every step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from rl_jax.arrays import Array, Tree


class Optimizer(NamedTuple):
    """How one tree of parameters is updated.

    `transform` sees gradients and returns the direction of descent without a learning rate;
    `learning_rate(TrainState.step)` scales it, so schedules go on across resets.
    """

    transform: optax.GradientTransformation
    learning_rate: Callable[[Array], Array]
    reset_at_push: bool = True


class TrainState(NamedTuple):
    params: dict[str, Tree]
    """Named trees: `policy`."""
    optimizer: dict[str, Any]
    """Moments and their bias-correction counts, per tree."""
    loss: Any
    """State of the loss transform."""
    step: Array
    """int32 scalar: optimizer steps applied so far; never reset."""


def adam(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    total_steps: int = 1,
    final_share: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    reset_at_push: bool = True,
) -> Optimizer:
    """AdamW on gradients clipped by global norm.

    The learning rate rises linearly over `warmup_steps` and falls linearly from its full value at
    step 0 to `final_share` of it at `total_steps`.
    """

    def schedule(step: Array) -> Array:
        ramp = jnp.minimum(1.0, (step + 1) / warmup_steps) if warmup_steps else jnp.float32(1.0)
        gone = jnp.minimum(1.0, step / total_steps)
        return jnp.float32(learning_rate) * ramp * (1.0 - (1.0 - final_share) * gone)

    transform = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale(-1.0),
    )
    return Optimizer(transform, schedule, reset_at_push)


def init_state(
    params: dict[str, Tree], optimizers: Mapping[str, Optimizer], loss: Any
) -> TrainState:
    """A fresh state; `loss` is the loss transform's initial state."""
    moments = {name: optimizers[name].transform.init(tree) for name, tree in params.items()}
    return TrainState(params, moments, loss, jnp.int32(0))


def reset_optimizers(state: TrainState, optimizers: Mapping[str, Optimizer]) -> TrainState:
    """Re-initialises moments and bias-correction counts of the trees that reset at a push.

    Parameters and `step` stay, so schedules are continuous (GLM-5, arXiv 2602.15763, sec. 4.1).
    """
    moments = {
        name: optimizers[name].transform.init(tree)
        if optimizers[name].reset_at_push
        else state.optimizer[name]
        for name, tree in state.params.items()
    }
    return state._replace(optimizer=moments)
