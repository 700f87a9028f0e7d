"""[N] The names metrics go by in `metrics.jsonl`, on the terminal and in plots.

A metric is spelled once, here; each name says its unit where the number alone does not.
"""

import re

STEP = "step"
"""Optimizer updates done, counted from 1."""
POLICY_VERSION = "policy_version"
"""Newest published version when the line was written."""
WALL_SECONDS = "wall_seconds"
"""Since the run began."""

REWARD = "reward"
"""Mean reward of the batch's valid rollouts, padding copies left out."""
LOSS = "loss"
"""Sum of weight x term over the batch's tokens."""
GRAD_NORM = "grad_norm"
"""Global norm of the gradient before clipping."""
LEARNING_RATE = "learning_rate"
"""Of the update just done."""

RATIO_MEAN = "ratio_mean"
"""Mean over trained tokens of current / behavior probability."""
RATIO_MAX = "ratio_max"
"""Largest such ratio."""
MASKED_SHARE = "masked_share"
"""Share of the sampled tokens that the loss's masks dropped, whichever: no surrogate, still in the
denominator."""
STALE_SHARE = "stale_share"
"""Share of the sampled tokens masked for a lag above the staleness bound; only where the policy
masks."""
ESS_WEIGHT = "ess/weight"
"""Mean weight of the sampled tokens, masked ones 0."""
ESS_WEIGHT_SQUARED = "ess/weight_squared"
"""Mean of that weight's square."""
ESS_SHARE = "ess_share"
"""Effective sample size of the weights over the number of sampled tokens."""
DLOGP_FRESH = "dlogp_fresh"
"""Largest |behavior - trainer log-probability| over one version's tokens, under the weights
published as that version. Told once a version, at the first batch with tokens of it,
absent elsewhere."""

FRESH_TOKENS = "fresh_tokens"
"""Tokens that `dlogp_fresh` was taken over."""

ROUTER_LARGEST_LOAD = "router/largest_load"
"""Tokens of the expert that the router chose most often, over the mean of all layers' experts."""
ROUTER_UNUSED_SHARE = "router/unused_share"
"""Share of the experts, all layers together, that the router chose for no token of the batch."""
ROUTER_DIFFERING_SHARE = "router/differing_share"
"""Share of the sampler's recorded choices that the trainer's router does not make itself; 0 where
none were recorded."""

CRITIC_LOSS = "critic/loss"
"""Loss of the critic on the batch, before it was trained on it."""
CRITIC_GRAD_NORM = "critic/grad_norm"
"""Global norm of the critic's gradient before clipping, at its first update on the batch."""
CRITIC_EXPLAINED_VARIANCE = "critic/explained_variance"
"""1 - variance of (returns - values) / variance of the returns, over the batch's sampled tokens and
before the critic was trained on it."""
CRITIC_RETURNS = "critic/returns"
"""Mean of what the critic shall predict."""
CRITIC_RETURNS_SQUARED = "critic/returns_squared"
"""Mean of its square."""
CRITIC_ERROR = "critic/error"
"""Mean of returns - values."""
CRITIC_ERROR_SQUARED = "critic/error_squared"
"""Mean of that error's square."""

LAG_MEAN = "lag_mean"
"""Mean over sampled tokens of newest published version - the token's version, at consumption."""
LAG_MAX = "lag_max"
"""Largest lag at consumption; above the staleness bound only where the policy masks such tokens."""
LAG_UPDATES_MEAN = "lag_updates_mean"
"""Mean lag counted in updates instead of pushes."""

TRAINED_TOKENS = "trained_tokens"
"""Sampled tokens trained on so far in the run."""
TRAINED_TRAJECTORIES = "trained_trajectories"
"""Trajectories trained on so far, copies left out."""
DROPPED = "dropped"
"""Trajectories dropped so far, all reasons together."""
FAILED = "failed"
"""Rollouts that the environment broke so far."""
PADDING_SHARE = "padding_share"
"""Share of the packed rows' tokens that are padding."""
TRAINED_LENGTH = "trained_length"
"""Mean tokens of a trained trajectory."""
OFFERED_LENGTH = "offered_length"
"""Mean tokens of a finished trajectory, trained or not; how far `trained_length` is from it is
the bias of the staleness policy."""

WAIT_SECONDS = "wait_seconds"
"""How long the trainer waited for the batch of this update."""
STEP_SECONDS = "step_seconds"
"""From the batch built to the policy updated: estimates and advantages, an audit, the critic's
updates, scores, gradients and the policy's update."""
PUSH_SECONDS = "push_seconds"
"""How long a push kept the trainer: the reset and the copy; 0 without a push."""

QUEUE_DEPTH = "queue_depth"
"""Complete groups that wait for the trainer."""
IN_FLIGHT = "in_flight"
"""Rollouts under way."""
STALE_CACHE_TOKENS = "stale_cache_tokens"
"""Tokens sampled so far from caches that older versions than their own have written in, as
`sampler.on_push = "keep"` lets them be; of a sampler in this process."""
SAMPLER_TOKENS_PER_SECOND = "sampler_tokens_per_second"
"""Tokens sampled per second since the last line."""
TRAINER_BUSY_SHARE = "trainer_busy_share"
"""Share of the time since the last line in which the trainer's mesh ran."""
SAMPLER_BUSY_SHARE = "sampler_busy_share"
"""Share of the time since the last line in which the sampler's mesh ran."""
OVERLAP_SHARE = "overlap_share"
"""Share of the trainer's busy time since the last line in which the sampler ran too."""


def ratio(numerator: str, denominator: str) -> str:
    """What the metrics of one ratio begin with, e.g. ratio/current_behavior."""
    return "ratio/" + re.sub(r"\W+", "_", f"{numerator}_{denominator}").strip("_")
