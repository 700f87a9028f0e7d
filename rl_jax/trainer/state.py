"""[P] The trainer's state: one pytree, donated at every step."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from rl_jax.arrays import Array, Tree
from rl_jax.losses.types import PROXIMAL
from rl_jax.precision import widened

POLICY, CRITIC = "policy", "critic"
"""The trees that are trained; the others go by the score that they give."""


class Optimizer(NamedTuple):
    """How one tree of parameters is updated.

    `transform` sees gradients and returns the direction of descent without a learning rate;
    `learning_rate(TrainState.step)` scales it, so schedules go on across resets.
    """

    transform: optax.GradientTransformation
    learning_rate: Callable[[Array], Array]
    reset_at_push: bool = True
    updates_per_step: int = 1
    """Updates that the tree gets on every batch; the policy gets one."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters' paths, as "trunk.blocks.*.mixer.*": no gradient, no update."""


class Storage(NamedTuple):
    """What the trees of `TrainState.params` are kept in (`precision.kept_in`).

    Scores and gradients are always of the parameters rounded to `dtype`, and gradients are summed
    in float32. With `masters` the trained trees themselves stay in float32, so no small step is
    lost; without, an update is computed in float32 and rounded. Moving averages stay in float32,
    the trees of other scores are kept in `dtype`.
    """

    dtype: str = "float32"
    masters: bool = True

    @property
    def trained(self) -> str:
        """The dtype of the trees that are trained."""
        return "float32" if self.masters else self.dtype


FLOAT32 = Storage()


class TrainState(NamedTuple):
    params: dict[str, Tree]
    """Named trees: `policy`, perhaps `critic`, and those of other scores: `proximal`, ... What is
    trained is kept here and nowhere else, masters included."""
    optimizer: dict[str, Any]
    """Moments and their bias-correction counts, per tree that is trained."""
    loss: dict[str, Any]
    """State of the loss transform, per tree that is trained."""
    step: Array
    """int32 scalar: updates of the policy applied so far; never reset."""


def adam(
    learning_rate: float,
    *,
    hold_steps: int = 0,
    warmup_steps: int = 0,
    total_steps: int = 1,
    final_share: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    reset_at_push: bool = True,
    updates_per_step: int = 1,
    frozen: tuple[str, ...] = (),
    moment_dtype: DTypeLike = jnp.float32,
) -> Optimizer:
    """AdamW on gradients clipped by global norm, its moments kept in `moment_dtype`.

    The learning rate is 0 for `hold_steps`, rises linearly over `warmup_steps` after them, and
    falls linearly from its full value at step 0 to `final_share` of it at `total_steps`.
    """

    def schedule(step: Array) -> Array:
        begun = step - hold_steps if hold_steps else step
        ramp = jnp.minimum(1.0, (begun + 1) / warmup_steps) if warmup_steps else jnp.float32(1.0)
        gone = jnp.minimum(1.0, step / total_steps)
        rate = jnp.float32(learning_rate) * ramp * (1.0 - (1.0 - final_share) * gone)
        return jnp.where(begun >= 0, rate, 0.0) if hold_steps else rate

    transform = optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale(-1.0),
    )
    stored = moments_in(transform, moment_dtype)
    return Optimizer(stored, schedule, reset_at_push, updates_per_step, frozen)


def moments_in(
    transform: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformation:
    """`transform` with the floats of its state kept in `dtype` and computed in float32.

    A second moment moves by at least 1 - b2 of its distance in a step, which bfloat16 (8 bits)
    keeps up to b2 = 0.99 and loses at 0.999.
    """

    def kept(state: Tree) -> Tree:
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state
        )

    def init(params: Tree) -> Tree:
        return kept(transform.init(widened(params)))

    def update(updates: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        updates, state = transform.update(updates, widened(state), widened(params))
        return updates, kept(state)

    return optax.GradientTransformation(init, update)


def trained(tree: Tree, frozen: tuple[str, ...]) -> Tree:
    """The tree with None for every leaf whose path matches a pattern of `frozen`."""
    if not frozen:
        return tree

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        name = path_of(path)
        return None if any(fnmatchcase(name, pattern) for pattern in frozen) else leaf

    return jax.tree_util.tree_map_with_path(one, tree)


def whole(part: Tree, tree: Tree) -> Tree:
    """`tree` with the leaves that `part`, made by `trained`, has in their places."""
    return jax.tree.map(
        lambda own, leaf: leaf if own is None else own, part, tree, is_leaf=lambda own: own is None
    )


def path_of(path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def init_state(
    params: dict[str, Tree], optimizers: Mapping[str, Optimizer], losses: Mapping[str, Any]
) -> TrainState:
    """A fresh state; `losses` are the loss transforms' initial states, per tree."""
    moments = {name: _fresh(own, params[name]) for name, own in optimizers.items()}
    return TrainState(params, moments, dict(losses), jnp.int32(0))


def after_push(state: TrainState, optimizers: Mapping[str, Optimizer]) -> TrainState:
    """Re-initialises moments and bias-correction counts of the trees that reset at a push; the
    policy becomes the proximal one, where there is one.

    What is trained and `step` stay, so schedules are continuous (GLM-5, arXiv 2602.15763, 4.1).
    """
    moments = {
        name: _fresh(own, state.params[name]) if own.reset_at_push else state.optimizer[name]
        for name, own in optimizers.items()
    }
    params = dict(state.params)
    if PROXIMAL in params:
        params[PROXIMAL] = jax.tree.map(
            lambda new, old: new.astype(old.dtype), params[POLICY], params[PROXIMAL]
        )
    return state._replace(optimizer=moments, params=params)


def _fresh(optimizer: Optimizer, tree: Tree) -> Any:
    return optimizer.transform.init(trained(tree, optimizer.frozen))
