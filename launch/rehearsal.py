"""[H] A loss tried on made-up scores before a run begins: traced only, so no device is taken."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from rl_jax.arrays import Array
from rl_jax.config.base import UserError
from rl_jax.losses.evaluate import DTYPES, evaluate
from rl_jax.losses.types import Loss, LossTransform, Scores
from rl_jax.trainer.batches import reduce
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status, Trajectory

ROWS, TOKENS = 2, 8


def rehearse(loss: Loss, told: str) -> None:
    """UserError, after `told`, for what a loss raises, and for one that pushes nothing at all."""
    try:
        pushes = _depends_on_scores(loss.transform)
        _check_weights(loss)
    except Exception as error:
        raise UserError(f"{told}: {in_one_line(error)}") from error
    if not pushes:
        raise UserError(
            f"{told}: no part writes a loss that the policy can follow; end the chain with "
            "policy_gradient(), clipped(), importance_sampled() or another objective"
        )


def in_one_line(error: BaseException) -> str:
    """What an error says; its kind too where the words alone do not tell."""
    words = " ".join(str(error).split())
    plain = type(error) in (ValueError, UserError, ImportError, ModuleNotFoundError)
    return words if plain and words else f"{type(error).__name__}: {words}".rstrip(": ")


def _depends_on_scores(transform: LossTransform) -> bool:
    """Traces value, gradient and new state. Where no part writes a loss, autodiff finds none of
    the scores on the way to it, and the gradient is a constant: zeros."""
    shapes = _scores(transform)

    def gradient(scores: Scores) -> tuple[Array, ...]:
        stats = transform.stats(scores) if transform.stats else ()
        state = transform.init()

        def value(own: Array, others: dict[str, Array]) -> Array:
            mine = scores._replace(current=own, others=others)
            return jnp.sum(evaluate(transform, mine, stats, state)[0].loss)

        slopes = jax.grad(value, argnums=(0, 1))(scores.current, dict(scores.others))
        transform.advance(state, stats)
        return tuple(jax.tree.leaves(slopes))

    jaxpr = jax.make_jaxpr(gradient)(shapes).jaxpr
    known = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in known for v in equation.invars):
            known.update(equation.outvars)
    return any(not isinstance(v, Literal) and v in known for v in jaxpr.outvars)


def _scores(transform: LossTransform) -> Any:
    """The shapes of a microbatch with every score that the transform needs."""
    shapes: dict[str, Any] = {
        field: jax.ShapeDtypeStruct((ROWS, TOKENS), DTYPES.get(field, jnp.float32))
        for field in Scores._fields
        if field != "others"
    }
    others: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.float32) for name in sorted(transform.needs)
    }
    return Scores(**shapes, others=others)


def _check_weights(loss: Loss) -> None:
    """ValueError where the reduction gives no weights for trajectories."""
    mask = np.arange(TOKENS) >= TOKENS // 2
    made = [
        Trajectory(
            key=RolloutKey("lookup", row, 0),
            tokens=np.zeros(TOKENS, np.int32),
            loss_mask=mask,
            behavior_logprobs=np.zeros(TOKENS, np.float32),
            versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
            segments=(),
            temperature=1.0,
            reward=float(row),
            status=Status.COMPLETED,
        )
        for row in range(ROWS)
    ]
    reduce(loss.reduction, made)
