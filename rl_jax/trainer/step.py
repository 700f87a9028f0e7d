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
from rl_jax.losses.types import Loss, Scores, Terms
from rl_jax.metrics.states import Mean
from rl_jax.model import Model
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.scores import token_logprobs
from rl_jax.trainer.state import Optimizer, TrainState


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


def make_train_step(
    model: Model, loss: Loss, optimizers: Mapping[str, Optimizer], *, vocab_chunk: int
) -> TrainStep:
    """The pure step (state, batch) -> (state, report); jit it with the state donated.

    Raises ValueError at build time where the loss needs a score that no program computes.
    """
    if missing := loss.transform.needs:
        raise ValueError(
            f"the loss needs scores {sorted(missing)} that the trainer does not compute"
        )

    def scores_of(params: dict[str, Tree], part: Batch) -> Scores:
        current = token_logprobs(
            model,
            params["policy"],
            part.tokens,
            part.positions,
            part.segment_ids,
            part.temperature,
            vocab_chunk=vocab_chunk,
        )
        given = (part.behavior, part.mask, part.advantages, part.lag)
        return Scores(jnp.where(part.mask, current, 0.0), *map(jnp.asarray, given))

    def objective(
        params: dict[str, Tree], part: Batch, stats: Any, loss_state: Any
    ) -> tuple[Array, tuple[dict[str, Mean], Array]]:
        scores = scores_of(params, part)
        zeros = jnp.zeros_like(scores.current)
        terms = Terms(log_ratio=zeros, factor=zeros + 1.0, loss=zeros)
        terms, metrics = loss.transform.apply(scores, terms, stats, loss_state)
        bad = ~(jnp.isfinite(scores.current) & jnp.isfinite(terms.loss))
        bad_column = jnp.where(bad.any(axis=1), jnp.argmax(bad, axis=1), -1).astype(jnp.int32)
        return jnp.sum(part.weights * terms.loss), (metrics, bad_column)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        stats = _sum_stats(loss, lambda part: scores_of(state.params, part), batch)
        gradient = jax.value_and_grad(objective, has_aux=True)

        def accumulate(index: Array, sums: _Sums) -> _Sums:
            part = _microbatch(batch, index)
            (value, (metrics, bad)), grads = gradient(state.params, part, stats, state.loss)
            return _Sums(
                jax.tree.map(jnp.add, sums.grads, grads),
                sums.loss + value,
                {name: sums.metrics[name].merge(metrics[name]) for name in metrics},
                sums.bad_column.at[index].set(bad),
            )

        sums = jax.lax.fori_loop(
            0, batch.count, accumulate, _no_sums(gradient, state, stats, batch)
        )
        return _update(state, sums, stats, loss, optimizers)

    return step


def _microbatch(batch: Batch, index: Array | int) -> Batch:
    return Batch(*(jnp.asarray(leaf)[index] for leaf in batch[:-1]), count=batch.count)


def _no_sums(gradient: Callable, state: TrainState, stats: Any, batch: Batch) -> _Sums:
    (value, (metrics, bad)), grads = jax.eval_shape(
        gradient, state.params, _microbatch(batch, 0), stats, state.loss
    )
    bad_column = jnp.full((batch.tokens.shape[0], *bad.shape), -1, bad.dtype)
    return _Sums(_zeros_like(grads), _zeros_like(value), _zeros_like(metrics), bad_column)


def _zeros_like(shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _sum_stats(loss: Loss, scores_of: Callable[[Batch], Scores], batch: Batch) -> Any:
    """The first pass, run only if some transform has statistics."""
    if (stats := loss.transform.stats) is None:
        return ()

    def body(index: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, stats(scores_of(_microbatch(batch, index))))

    shapes = jax.eval_shape(lambda: stats(scores_of(_microbatch(batch, 0))))
    return jax.lax.fori_loop(0, batch.count, body, _zeros_like(shapes))


def _update(
    state: TrainState, sums: _Sums, stats: Any, loss: Loss, optimizers: Mapping[str, Optimizer]
) -> tuple[TrainState, StepReport]:
    finite = {
        jax.tree_util.keystr(path, simple=True, separator="."): jnp.isfinite(leaf).all()
        for path, leaf in jax.tree_util.tree_leaves_with_path(sums.grads)
    }
    params, moments = {}, {}
    for name, optimizer in optimizers.items():
        grads, old = sums.grads[name], state.params[name]
        updates, moments[name] = optimizer.transform.update(grads, state.optimizer[name], old)
        rate = optimizer.learning_rate(state.step)
        params[name] = jax.tree.map(lambda p, u, rate=rate: p + rate * u, old, updates)
    new = TrainState(params, moments, loss.transform.advance(state.loss, stats), state.step + 1)
    applied = jnp.isfinite(sums.loss) & jnp.stack(list(finite.values())).all()
    # Or XLA fuses the whole conjunction into the update of every leaf.
    applied = jax.lax.optimization_barrier(applied)
    state = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, state)
    norm = optax.tree.norm(sums.grads)
    return state, StepReport(sums.loss, norm, sums.metrics, finite, sums.bad_column)
