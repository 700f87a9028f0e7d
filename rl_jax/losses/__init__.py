"""[H] The loss library's face: `from rl_jax import losses`, then `losses.chain(...)`.

`losses.recipes` holds the named losses, `losses.plot` draws any of them.
"""

from rl_jax.losses import recipes
from rl_jax.losses.bounds import clamp, truncate, weigh
from rl_jax.losses.combine import chain, per_task, token_weights, weighted_sum
from rl_jax.losses.curves import weight_curve
from rl_jax.losses.distillation import teacher_advantage
from rl_jax.losses.estimators import estimate
from rl_jax.losses.evaluate import LOG_RATIO_BOUND, evaluate, make_scores, start
from rl_jax.losses.masks import (
    band_mask,
    divergence_mask,
    estimator_mask,
    mask_stale,
    masked_above,
    sequence_kl_mask,
    two_sided_mask,
    veto,
)
from rl_jax.losses.objectives import (
    clipped,
    cross_entropy,
    geometric_mean,
    importance_sampled,
    policy_gradient,
    soft_gated,
    squared_sequence,
    value_loss,
)
from rl_jax.losses.penalties import adaptive_kl, entropy_bonus, kl, squared_log_ratio
from rl_jax.losses.plot import plot
from rl_jax.losses.ratios import (
    current_over_behavior,
    current_over_proximal,
    ess_share,
    proximal_over_behavior,
    ratio,
)
from rl_jax.losses.reductions import (
    constant_norm,
    prompt_mean,
    rollout_mean,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
)
from rl_jax.losses.second_moment import second_moment_mask
from rl_jax.losses.segments import segment_any, segment_count, segment_mean, segment_sum
from rl_jax.losses.types import (
    Loss,
    LossTransform,
    Metrics,
    Reduction,
    Scores,
    Terms,
    drop,
    ema,
    sampled,
    stateless,
    task_id,
    teacher,
)

__all__ = [
    "LOG_RATIO_BOUND",
    "Loss",
    "LossTransform",
    "Metrics",
    "Reduction",
    "Scores",
    "Terms",
    "adaptive_kl",
    "band_mask",
    "chain",
    "clamp",
    "clipped",
    "constant_norm",
    "cross_entropy",
    "current_over_behavior",
    "current_over_proximal",
    "divergence_mask",
    "drop",
    "ema",
    "entropy_bonus",
    "ess_share",
    "estimate",
    "estimator_mask",
    "evaluate",
    "geometric_mean",
    "importance_sampled",
    "kl",
    "make_scores",
    "mask_stale",
    "masked_above",
    "per_task",
    "plot",
    "policy_gradient",
    "prompt_mean",
    "proximal_over_behavior",
    "ratio",
    "recipes",
    "rollout_mean",
    "sampled",
    "second_moment_mask",
    "segment_any",
    "segment_count",
    "segment_mean",
    "segment_sum",
    "sequence_kl_mask",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "soft_gated",
    "squared_log_ratio",
    "squared_sequence",
    "start",
    "stateless",
    "task_id",
    "teacher",
    "teacher_advantage",
    "token_mean",
    "token_sum",
    "token_weights",
    "truncate",
    "two_sided_mask",
    "value_loss",
    "veto",
    "weigh",
    "weight_curve",
    "weighted_sum",
]
