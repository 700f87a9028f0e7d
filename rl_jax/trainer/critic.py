"""[P] A critic: a trunk like the policy's and a linear head that says what is still to come.

Its tree is {"trunk": parameters of the model, "head": {"weight": [D], "bias": []}}. The trunk
starts as the policy and the head at zero, so a critic follows from the first policy alone.
"""

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp

from rl_jax.advantages import LOG_RATIOS, VALUES
from rl_jax.arrays import CHUNK, Array, Tree
from rl_jax.losses.types import VALUE, Loss, Scores
from rl_jax.metrics import names
from rl_jax.model import Model
from rl_jax.precision import kept_in
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.scores import scores_of_batch, token_logprobs, token_values
from rl_jax.trainer.state import CRITIC, FLOAT32, POLICY, Optimizer, Storage
from rl_jax.trainer.step import TrainStep, make_step, microbatch

Estimate = Callable[[Mapping[str, Tree], Batch], dict[str, Array]]
"""(trees by name, batch) -> float32[M, R, L] by estimate; 0 where nothing was sampled."""


def first_critic(model: Model, policy: Tree) -> Tree:
    """The critic that a run begins with: all its values are 0."""
    row = jax.ShapeDtypeStruct((1, CHUNK), jnp.int32)
    hidden = jax.eval_shape(model.forward, policy, row, row, row)
    head = {"weight": jnp.zeros(hidden.shape[-1]), "bias": jnp.zeros(())}
    return {"trunk": policy, "head": head}


def make_critic_step(
    model: Model,
    loss: Loss,
    optimizers: Mapping[str, Optimizer],
    storage: Storage = FLOAT32,
) -> TrainStep:
    """The pure step (state, batch) -> (state, report) of the critic; jit it with the state donated.

    `batch.weights` are those of the critic's own reduction. ValueError for a loss that needs more
    than values.
    """
    if more := loss.transform.needs - {VALUE}:
        raise ValueError(f"the critic's loss needs {sorted(more)}; it has value and returns")

    def scores_of(params: dict[str, Tree], part: Batch) -> tuple[Scores, None]:
        values = token_values(model, params[CRITIC], part)
        return scores_of_batch(part, jnp.asarray(part.behavior), {VALUE: values}), None

    return make_step(CRITIC, loss, optimizers[CRITIC], scores_of, storage)


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - variance of the errors / variance of the returns, of the means that the step of
    `recipes.critic` reports; 0 where all returns are equal."""

    def variance(mean: str, squared: str) -> float:
        return max(means[squared] - means[mean] ** 2, 0.0)

    returns = variance(names.CRITIC_RETURNS, names.CRITIC_RETURNS_SQUARED)
    errors = variance(names.CRITIC_ERROR, names.CRITIC_ERROR_SQUARED)
    return 1.0 - errors / returns if returns > 0 else 0.0


def make_estimates(
    model: Model,
    needs: Collection[str],
    *,
    vocab_chunk: int,
    storage: Storage = FLOAT32,
    replay: bool = False,
) -> Estimate:
    """The pure pass over a batch that gives the `needs` of an advantage, VALUES or LOG_RATIOS:
    the critic's values, the policy's log-probabilities minus those of behavior.

    `replay` as in `policy_scores`.
    """

    def one(params: Mapping[str, Tree], part: Batch) -> dict[str, Array]:
        found = {}
        if VALUES in needs:
            found[VALUES] = token_values(model, params[CRITIC], part)
        if LOG_RATIOS in needs:
            arrays = part.tokens, part.positions, part.segment_ids, part.temperature
            choices = part.choices if replay else None
            current = token_logprobs(
                model, params[POLICY], *arrays, vocab_chunk=vocab_chunk, choices=choices
            )
            found[LOG_RATIOS] = current - part.behavior
        return {name: jnp.where(part.mask, array, 0.0) for name, array in found.items()}

    def estimate(params: Mapping[str, Tree], batch: Batch) -> dict[str, Array]:
        kept = kept_in(params, storage.dtype)

        def body(index: Array, done: dict[str, Array]) -> dict[str, Array]:
            found = one(kept, microbatch(batch, index))
            return {name: done[name].at[index].set(found[name]) for name in done}

        nothing = {name: jnp.zeros(batch.tokens.shape, jnp.float32) for name in needs}
        return jax.lax.fori_loop(0, batch.count, body, nothing)

    return estimate
