"""[P] A teacher in the place of a reward. As a term beside one: `kl("teacher(x)", ...)`."""

import jax
import jax.numpy as jnp

from rl_jax.losses.arguments import positive
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.types import (
    LossTransform,
    Metrics,
    Scores,
    Terms,
    sampled,
    stateless,
    teacher,
)
from rl_jax.metrics.states import Mean


def teacher_advantage(name: str, bound: float | None = None) -> LossTransform:
    """advantages := clip(sg(log pi_teacher - log pi_current), -bound, bound), teacher `name`.

    Following it descends KL(current || teacher) one token at a time. Without `bound` the cut of all
    log-ratios holds, +-20. Sources: on-policy distillation in GLM-5 (arXiv 2602.15763) and
    Kimi K3 (arXiv 2607.24653). Metrics: teacher_advantage/mean, its mean, and
    teacher_advantage/bounded, the share at the bound.
    """
    part, score = "teacher_advantage", teacher(name)
    limit = LOG_RATIO_BOUND if bound is None else positive(part, "bound", bound)
    limit = min(limit, LOG_RATIO_BOUND)

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        apart = jax.lax.stop_gradient(scores.score(score, part) - scores.current)
        apart = jnp.where(scores.mask, apart, 0.0)
        advantages = jnp.clip(apart, -limit, limit)
        bounded = (jnp.abs(apart) > limit).astype(jnp.float32)
        metrics = {
            f"{part}/mean": Mean.of(advantages, sampled(scores)),
            f"{part}/bounded": Mean.of(bounded, sampled(scores)),
        }
        return terms._replace(advantages=advantages), metrics

    return stateless(part, apply, (score,))
