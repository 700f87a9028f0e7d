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
from rl_jax.trainer.anchors import follow
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.scores import policy_scores
from rl_jax.trainer.state import POLICY, Optimizer, TrainState, path_of, trained, whole


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


ScoresOf = Callable[[dict[str, Tree], Batch], Scores]
"""(params, a microbatch) -> its scores."""


def make_train_step(
    model: Model, loss: Loss, optimizers: Mapping[str, Optimizer], *, vocab_chunk: int
) -> TrainStep:
    """The pure step (state, batch) -> (state, report) of the policy; jit it with the state donated.

    ValueError when it is traced, where the loss needs the score of a tree that the state lacks; and
    at once for more than one update per step, which only a critic gets.
    """
    if (updates := optimizers[POLICY].updates_per_step) != 1:
        raise ValueError(f"the policy gets one update per step, not {updates}")
    needs = loss.transform.needs

    def scores_of(params: dict[str, Tree], part: Batch) -> Scores:
        return policy_scores(model, params, part, needs, vocab_chunk=vocab_chunk)

    return make_step(POLICY, loss, optimizers[POLICY], scores_of)


def make_step(name: str, loss: Loss, optimizer: Optimizer, scores_of: ScoresOf) -> TrainStep:
    """The step that trains the tree `name` and hands all others on.

    An update of the policy counts in `TrainState.step` and moves its averages.
    """

    def objective(
        own: dict[str, Tree], params: dict[str, Tree], part: Batch, stats: Any, loss_state: Any
    ) -> tuple[Array, tuple[dict[str, Mean], Array]]:
        scores = scores_of(params | {name: whole(own[name], params[name])}, part)
        terms, metrics = evaluate(loss.transform, scores, stats, loss_state)
        bad = ~(jnp.isfinite(scores.current) & jnp.isfinite(terms.loss))
        bad_column = jnp.where(bad.any(axis=1), jnp.argmax(bad, axis=1), -1).astype(jnp.int32)
        return jnp.sum(part.weights * terms.loss), (metrics, bad_column)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        stats = _sum_stats(loss, lambda part: scores_of(state.params, part), batch)
        own = {name: trained(state.params[name], optimizer.frozen)}

        def gradient(part: Batch) -> Any:
            differentiated = jax.value_and_grad(objective, has_aux=True)
            return differentiated(own, state.params, part, stats, state.loss[name])

        def accumulate(index: Array, sums: _Sums) -> _Sums:
            (value, (metrics, bad)), grads = gradient(microbatch(batch, index))
            return _Sums(
                jax.tree.map(jnp.add, sums.grads, grads),
                sums.loss + value,
                {metric: sums.metrics[metric].merge(metrics[metric]) for metric in metrics},
                sums.bad_column.at[index].set(bad),
            )

        sums = jax.lax.fori_loop(0, batch.count, accumulate, _no_sums(gradient, batch))
        return _update(
            name, state, sums, loss.transform.advance(state.loss[name], stats), optimizer
        )

    return step


def microbatch(batch: Batch, index: Array | int) -> Batch:
    """Arrays [R, L] of one microbatch."""
    return Batch(*(jnp.asarray(leaf)[index] for leaf in batch[:-1]), count=batch.count)


def _no_sums(gradient: Callable[[Batch], Any], batch: Batch) -> _Sums:
    (value, (metrics, bad)), grads = jax.eval_shape(gradient, microbatch(batch, 0))
    bad_column = jnp.full((batch.tokens.shape[0], *bad.shape), -1, bad.dtype)
    return _Sums(_zeros_like(grads), _zeros_like(value), _zeros_like(metrics), bad_column)


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
    name: str, state: TrainState, sums: _Sums, loss_state: Any, optimizer: Optimizer
) -> tuple[TrainState, StepReport]:
    finite = {
        path_of(path): jnp.isfinite(leaf).all()
        for path, leaf in jax.tree_util.tree_leaves_with_path(sums.grads)
    }
    own = trained(state.params[name], optimizer.frozen)
    updates, moments = optimizer.transform.update(sums.grads[name], state.optimizer[name], own)
    rate = optimizer.learning_rate(state.step)
    moved = jax.tree.map(lambda p, u: p + rate * u, own, updates)
    params = state.params | {name: whole(moved, state.params[name])}
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
    state = jax.tree.map(lambda a, b: b if a is b else jnp.where(applied, a, b), new, state)
    norm = optax.tree.norm(sums.grads)
    return state, StepReport(sums.loss, norm, sums.metrics, finite, sums.bad_column)
