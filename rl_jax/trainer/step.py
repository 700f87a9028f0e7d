"""[P] The trainer's step: microbatches summed by a loop, one update, donated state.

The traced loss is sum(weight * term) with weights from the host, so neither the split into
microbatches nor the mesh changes what is computed.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rl_jax.arrays import Array, Tree
from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.types import Loss, Scores
from rl_jax.metrics.states import Mean
from rl_jax.model import Model
from rl_jax.precision import kept_in, widened
from rl_jax.trainer.anchors import follow
from rl_jax.trainer.batches import Batch, map_arrays
from rl_jax.trainer.routing import Routed, told
from rl_jax.trainer.scores import policy_scores
from rl_jax.trainer.state import (
    FLOAT32,
    POLICY,
    Optimizer,
    Storage,
    TrainState,
    path_of,
    trained,
    whole,
)


class StepReport(NamedTuple):
    """What one step says of itself."""

    loss: Array
    grad_norm: Array
    """Global norm before clipping."""
    metrics: dict[str, Mean]
    finite: dict[str, Array]
    """Per tensor (by path), whether its gradient was finite. One False: step not applied."""
    bad_column: Array
    """int32[M, R]: first column of a row whose log-probability or term was not finite, or -1."""


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepReport]]


class _Sums(NamedTuple):
    grads: dict[str, Tree]
    loss: Array
    metrics: dict[str, Mean]
    bad_column: Array
    routed: Routed | None


ScoresOf = Callable[[dict[str, Tree], Batch], tuple[Scores, Routed | None]]
"""(params, a microbatch) -> its scores, and what a router did."""


Balance = Callable[[Tree, Routed | None], Tree]


class Experts(NamedTuple):
    """How a policy with experts is trained."""

    replay: bool = False
    """Tokens go to the experts that the sampler chose for them, where the batch has those (R3,
    arXiv 2510.11370)."""
    bias_rate: float = 0.0
    """What the routers' correction biases move by after an update, towards an even load."""


OWN_CHOICES = Experts()


def make_train_step(
    model: Model,
    loss: Loss,
    optimizers: Mapping[str, Optimizer],
    *,
    vocab_chunk: int,
    storage: Storage = FLOAT32,
    experts: Experts = OWN_CHOICES,
) -> TrainStep:
    """The pure step (state, batch) -> (state, report) of the policy; jit it with the state donated.

    ValueError when it is traced, where the loss needs the score of a tree that the state lacks; and
    at once for more than one update per step, which only a critic gets.
    """
    if (updates := optimizers[POLICY].updates_per_step) != 1:
        raise ValueError(f"the policy gets one update per step, not {updates}")
    needs = loss.transform.needs

    def scores_of(params: dict[str, Tree], part: Batch) -> tuple[Scores, Routed | None]:
        how = {"vocab_chunk": vocab_chunk, "replay": experts.replay}
        return policy_scores(model, params, part, needs, **how)

    def balance(policy: Tree, routed: Routed | None) -> Tree:
        if model.routing is None or routed is None or not experts.bias_rate:
            return policy
        return model.routing.balance(policy, routed.load, experts.bias_rate)

    return make_step(POLICY, loss, optimizers[POLICY], scores_of, storage, balance)


def make_step(
    name: str,
    loss: Loss,
    optimizer: Optimizer,
    scores_of: ScoresOf,
    storage: Storage,
    balance: Balance = lambda tree, routed: tree,
) -> TrainStep:
    """The step that trains the tree `name` and hands all others on.

    An update of the policy counts in `TrainState.step` and moves its averages. `balance` has the
    last word on the updated tree, unless the learning rate holds it where it is.
    """

    def objective(
        own: dict[str, Tree], params: dict[str, Tree], part: Batch, stats: Any, loss_state: Any
    ) -> tuple[Array, tuple[dict[str, Mean], Array, Routed | None]]:
        scores, routed = scores_of(params | {name: whole(own[name], params[name])}, part)
        terms, metrics = evaluate(loss.transform, scores, stats, loss_state)
        bad = ~(jnp.isfinite(scores.current) & jnp.isfinite(terms.loss))
        bad_column = jnp.where(bad.any(axis=1), jnp.argmax(bad, axis=1), -1).astype(jnp.int32)
        return jnp.sum(part.weights * terms.loss), (metrics, bad_column, routed)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        params = kept_in(state.params, storage.dtype)
        stats = _sum_stats(loss, lambda part: scores_of(params, part)[0], batch)
        own = {name: trained(params[name], optimizer.frozen)}

        def given(part: Batch) -> tuple[Any, ...]:
            return own, params, part, stats, state.loss[name]

        def accumulate(index: Array, sums: _Sums) -> _Sums:
            differentiated = jax.value_and_grad(objective, has_aux=True)
            (value, (metrics, bad, routed)), grads = differentiated(
                *given(microbatch(batch, index))
            )
            return _Sums(
                jax.tree.map(jnp.add, sums.grads, widened(grads)),
                sums.loss + value,
                {metric: sums.metrics[metric].merge(metrics[metric]) for metric in metrics},
                sums.bad_column.at[index].set(bad),
                jax.tree.map(jnp.add, sums.routed, routed),
            )

        # Forward alone: shapes of gradients are known, and tracing takes as long as compiling.
        shapes = jax.eval_shape(lambda: objective(*given(microbatch(batch, 0))))
        sums = jax.lax.fori_loop(0, batch.count, accumulate, _no_sums(own, shapes, batch))
        advanced = loss.transform.advance(state.loss[name], stats)
        return _update(name, state, sums, advanced, optimizer, balance)

    return step


def microbatch(batch: Batch, index: Array | int) -> Batch:
    """Arrays [R, L] of one microbatch."""
    return map_arrays(lambda leaf: jnp.asarray(leaf)[index], batch)


def _no_sums(own: dict[str, Tree], found: Any, batch: Batch) -> _Sums:
    """Of microbatches whose objective gives what has the shapes `found`."""
    value, (metrics, bad, routed) = found
    bad_column = jnp.full((batch.tokens.shape[0], *bad.shape), -1, bad.dtype)
    sums = _Sums(jax.eval_shape(widened, own), value, metrics, bad_column, routed)
    return _zeros_like(sums)._replace(bad_column=bad_column)


def _zeros_like(shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _sum_stats(loss: Loss, scores_of: Callable[[Batch], Scores], batch: Batch) -> Any:
    """The first pass, run only if some transform has statistics."""
    if (stats := loss.transform.stats) is None:
        return ()

    def body(index: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, stats(scores_of(microbatch(batch, index))))

    shapes = jax.eval_shape(lambda: stats(scores_of(microbatch(batch, 0))))
    return jax.lax.fori_loop(0, batch.count, body, _zeros_like(shapes))


def _update(
    name: str,
    state: TrainState,
    sums: _Sums,
    loss_state: Any,
    optimizer: Optimizer,
    balance: Balance,
) -> tuple[TrainState, StepReport]:
    finite = {
        path_of(path): jnp.isfinite(leaf).all()
        for path, leaf in jax.tree_util.tree_leaves_with_path(sums.grads)
    }
    own = trained(state.params[name], optimizer.frozen)
    updates, moments = optimizer.transform.update(sums.grads[name], state.optimizer[name], own)
    rate = optimizer.learning_rate(state.step)
    moved = jax.tree.map(lambda p, u: (widened(p) + rate * u).astype(p.dtype), own, updates)
    tree = whole(moved, state.params[name])
    balanced = balance(tree, sums.routed)
    params = state.params | {name: _chosen(rate != 0, balanced, tree)}
    if name == POLICY:
        params |= follow(params, sums.metrics)
    new = TrainState(
        params,
        state.optimizer | {name: moments},
        state.loss | {name: loss_state},
        state.step + 1 if name == POLICY else state.step,
    )
    applied = jnp.isfinite(sums.loss) & jnp.stack(list(finite.values())).all()
    # Or XLA fuses the whole conjunction into the update of every leaf.
    applied = jax.lax.optimization_barrier(applied)
    state = _chosen(applied, new, state)
    norm = optax.tree.norm(sums.grads)
    metrics = sums.metrics | (told(sums.routed) if sums.routed else {})
    return state, StepReport(sums.loss, norm, metrics, finite, sums.bad_column)


def _chosen(condition: Array, new: Tree, old: Tree) -> Tree:
    """`new` where the condition holds; a leaf that is the same in both costs nothing."""
    return jax.tree.map(lambda a, b: b if a is b else jnp.where(condition, a, b), new, old)
