"""Jobs and rates for tests of forecasts."""

import math
from typing import Any

from launch.plan.inputs import Job, Rates
from rl_jax.orchestrator.state import Limits, Pace


def job(
    *,
    in_flight: int,
    groups: int,
    size: int = 1,
    push_every: int = 1,
    ahead: float = 1000.0,
    tau: int = 10**6,
    when_stale: str = "mask",
    on_push: str = "keep",
    samplers: int = 1,
    slots: int | None = None,
) -> Job:
    """Of groups of `size`; nothing but `in_flight` binds where nothing else is said."""
    pace = Pace(tau, push_every) if when_stale == "pace" else None
    limits = Limits(size, groups, in_flight, ahead, pace=pace, retry_pause_s=1.0)
    return Job(
        limits, 1000, push_every, tau, when_stale, 60.0, on_push, samplers, slots or in_flight,
        math.inf,
    )  # fmt: skip


def rates(
    *,
    update_s: float,
    sigma: float = 0.0,
    rollout: dict[str, Any] | None = None,
    sampler: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> Rates:
    """Trajectories of 1,000 tokens in one turn, a step of 1 ms, prefill and pushes for nothing."""
    return Rates.model_validate(
        {
            "rollout": {
                "sampled_tokens": 1000.0,
                "sigma": sigma,
                "tokens_per_turn": 1e12,
                "prompt_tokens": 0.0,
                **(rollout or {}),
            },
            "sampler": {"step_s": 1e-3, "prefill_tokens_per_s": 1e12, **(sampler or {})},
            "trainer": {"tokens_per_s": 1e15, "update_s": update_s, **(trainer or {})},
        }
    )
