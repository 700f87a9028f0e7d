"""[P] Weights beside the policy that scores are taken under: what they start as, how they follow.

Each is a tree of `TrainState.params` by the name of its score. None has an optimizer.
"""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from rl_jax.arrays import Array, Tree
from rl_jax.losses.types import ENTROPY, VALUE
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean
from rl_jax.precision import kept_in, widened
from rl_jax.trainer.state import POLICY, Storage

_EMA, _TEACHER = "ema(", "teacher("


def anchors(needs: Iterable[str]) -> tuple[str, ...]:
    """Those of `needs` that are log-probabilities under other weights, sorted."""
    return tuple(sorted(set(needs) - {ENTROPY, VALUE}))


def teachers(needs: Iterable[str]) -> tuple[str, ...]:
    """The names of the teachers among `needs`, sorted."""
    return tuple(
        name.removeprefix(_TEACHER).removesuffix(")")
        for name in anchors(needs)
        if name.startswith(_TEACHER)
    )


def first_anchors(needs: Iterable[str], policy: Tree, known: Mapping[str, Tree]) -> dict[str, Tree]:
    """The trees that `needs` asks for: teachers out of `known`, by name, all others the policy."""
    found = {f"{_TEACHER}{name})": known[name] for name in teachers(needs)}
    return {name: policy for name in anchors(needs) if name not in found} | found


def kept(trees: Mapping[str, Tree], storage: Storage) -> dict[str, Tree]:
    """The trees that are not trained as a state keeps them: averages in float32, or each step
    towards the policy would be lost."""
    return {
        name: widened(tree) if name.startswith(_EMA) else kept_in(tree, storage.dtype)
        for name, tree in trees.items()
    }


def follow(params: Mapping[str, Tree], metrics: Mapping[str, Mean]) -> dict[str, Tree]:
    """The moving averages after an update of the policy that reported `metrics`.

    decay x average + (1 - decay) x policy; the policy itself where the update kept too few of its
    tokens (PPO-EWMA, arXiv 2605.12070).
    """
    moved = {}
    for name in (name for name in params if name.startswith(_EMA)):
        decay, reset_below = map(float, name.removeprefix(_EMA).removesuffix(")").split(", "))
        masked = metrics[names.MASKED_SHARE]
        lost = masked.total > (1.0 - reset_below) * masked.count
        moved[name] = jax.tree.map(
            lambda old, new, decay=decay, lost=lost: _average(old, new, decay, lost),
            params[name],
            params[POLICY],
        )
    return moved


def _average(old: Array, new: Array, decay: float, lost: Array) -> Array:
    return jnp.where(lost, new, decay * old + (1.0 - decay) * new)
