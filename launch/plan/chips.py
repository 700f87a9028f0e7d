"""[N] Rates that nobody measured: from a chip's published numbers and stated assumptions.

A first guess to be replaced by `--fit`. Attention's share of a training step is not counted.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from launch.plan.inputs import TOOL_SIGMA
from rl_jax.config.run import RunConfig
from rl_jax.model import Model


class Chip(NamedTuple):
    """Of one chip, as its maker states it."""

    flops: float
    """bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second, to its memory."""


CHIPS: Mapping[str, Chip] = {
    "v5p": Chip(459e12, 2765e9),
    "v6e": Chip(918e12, 1640e9),
    "h200": Chip(989e12, 4800e9),
}
WEIGHTS_SHARE, CACHE_SHARE = 0.5, 0.3
"""Of the bandwidth, in decode, for weights and for caches: what sglang-jax's 5,297 and 7,572 output
tokens/s at batches of 64 and 256 (Qwen3-8B, four v6e, 1K in and out) come to."""
PREFILL_SHARE, TRAIN_SHARE = 0.4, 0.2
"""Of the operations: assumed. For training between 10.5 % over a whole RL system (Qwen3-235B on
H200) and the 40 % of pretraining."""
PUSH_BYTES_PER_S = 61e9 / 4.4
"""verl pushes 30B parameters in bfloat16 in 4.4 s."""
SIGMA = 1.0
"""Assumed: of the logarithm of a trajectory's tokens."""
SOURCES = (
    f"{WEIGHTS_SHARE:.0%} and {CACHE_SHARE:.0%} of the bandwidth for weights and caches in decode "
    "(sglang-jax: Qwen3-8B on four v6e)",
    f"{PREFILL_SHARE:.0%} of the operations in prefill, {TRAIN_SHARE:.0%} in training (assumed)",
    f"{PUSH_BYTES_PER_S / 1e9:.0f} GB/s in a push (verl: 30B in 4.4 s)",
    "trajectories of half the turns and half the tokens a turn that the configuration allows, "
    f"sigma {SIGMA:g} (assumed)",
)
"""What the rates of a chip rest on."""


class Sizes(NamedTuple):
    """Of a model."""

    parameters: int
    active: int
    """Parameters that a token meets."""
    served_bytes: int
    """Of a published version."""
    cache_bytes: float
    """A request's caches at `context` tokens, as decode reads them."""


def sizes_of(config: RunConfig, model: Model, context: float) -> Sizes:
    """Of the policy; experts count as far as they are chosen."""
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    axes = jax.tree.leaves(model.axes(), is_leaf=lambda leaf: isinstance(leaf, tuple))
    matrix = jnp.dtype(config.sampler.param_dtype).itemsize
    chosen = 1.0
    if model.routing is not None:
        chosen = model.routing.chosen / model.routing.experts
    counts = [prod(leaf.shape) for leaf in shapes]
    active = sum(
        n * (chosen if "experts" in names else 1.0) for n, names in zip(counts, axes, strict=True)
    )
    served = sum(
        n * (matrix if leaf.ndim > 1 else 4) for n, leaf in zip(counts, shapes, strict=True)
    )
    spec = model.cache_spec
    tokens = sum(4 * cache.width * cache.heads for cache in spec.tokens) * context
    states = sum(2 * 4 * cache.heads * prod(cache.state) for cache in spec.states)
    return Sizes(sum(counts), round(active), served, tokens + states)


def rates_of_chip(config: RunConfig, model: Model, name: str) -> dict[str, Any]:
    """The table of a rates file for meshes of this chip."""
    chip, rollout = CHIPS[name], config.rollout
    turns, per_turn = (rollout.max_turns + 1) / 2, rollout.max_new_tokens / 2
    sampled = max(1.0, turns * per_turn)
    appended = min(sampled, config.sampler.max_context / 4)
    sizes = sizes_of(config, model, appended + sampled / 2)
    mesh, trainer = config.mesh.sampler, config.mesh.trainer
    prefill = PREFILL_SHARE * chip.flops * mesh.size / (2 * sizes.active)
    passes = 6 if config.model.remat == "none" else 8
    train = TRAIN_SHARE * chip.flops * trainer.size / (passes * sizes.active)
    return {
        "rollout": {
            "sampled_tokens": sampled,
            "sigma": SIGMA,
            "tokens_per_turn": max(1.0, per_turn),
            "prompt_tokens": appended / 2,
            "answer_tokens": appended / 2 / turns,
            "tool_median_s": config.task.tool_latency_median_s,
            "tool_sigma": TOOL_SIGMA,
        },
        "sampler": {
            "step_s": sizes.served_bytes / mesh.tensor / (WEIGHTS_SHARE * chip.bandwidth),
            "row_s": sizes.cache_bytes / mesh.size / (CACHE_SHARE * chip.bandwidth) + 1 / prefill,
            "prefill_tokens_per_s": prefill,
            "swap_s": 0.0,
        },
        "trainer": {
            "tokens_per_s": train,
            "push_s": 0.0,
            "publish_s": sizes.served_bytes / PUSH_BYTES_PER_S,
        },
    }
