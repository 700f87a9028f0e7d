"""[N] What a forecast needs to know: the job, as a configuration orders it, and its rates.

Rates are what no configuration holds. A rates file is their TOML; `--assume` replaces single ones.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from rl_jax.config.base import NonNegative, Positive, Section, UserError, explain
from rl_jax.config.run import RunConfig
from rl_jax.orchestrator.state import Limits

TOOL_SIGMA = math.log(10) / NormalDist().inv_cdf(0.99)
"""Of a lognormal whose 99th percentile is ten times its median, as a task's latency is."""
Share = Annotated[float, Field(ge=0, le=1)]


class RolloutRates(Section):
    """Of one rollout: how long it is, and what it waits for outside the sampler."""

    sampled_tokens: Positive
    """Mean of a trajectory."""
    sigma: NonNegative
    """Standard deviation of the logarithm of a trajectory's sampled tokens: lognormal."""
    same_in_group: Share = 0.0
    """Share of the logarithm's variance that the rollouts of a prompt have in common."""
    tokens_per_turn: Positive
    """Sampled between two tool calls."""
    prompt_tokens: NonNegative
    answer_tokens: NonNegative = 0.0
    """Appended between two turns."""
    tool_median_s: NonNegative = 0.0
    tool_sigma: NonNegative = 0.0
    """Of the logarithm of a tool's seconds: lognormal."""
    failed_share: Share = 0.0
    """Of all rollouts, broken by their environment."""


class SamplerRates(Section):
    """Of one sampler. A decode step of n requests takes step_s + n row_s seconds."""

    step_s: Positive
    row_s: NonNegative = 0.0
    request_s: NonNegative = 0.0
    """Of a prefill, whatever its length."""
    prefill_tokens_per_s: Positive
    swap_s: NonNegative = 0.0
    """Pause at a push."""
    losses_per_hour: NonNegative = 0.0
    """How often a sampler goes away with all its rollouts."""
    restart_s: NonNegative = 0.0


class TrainerRates(Section):
    """Of the trainer's whole mesh. An update takes update_s + tokens / tokens_per_s."""

    tokens_per_s: Positive
    """Tokens of trajectories, those of prompts and tools included."""
    update_s: NonNegative = 0.0
    push_s: NonNegative = 0.0
    """The trainer is held up by a push for so long."""
    publish_s: NonNegative = 0.0
    """From there until samplers swap and the version counts as published."""


class Rates(Section):
    """Measured by `--fit`, or assumed."""

    rollout: RolloutRates
    sampler: SamplerRates
    trainer: TrainerRates


class Job(NamedTuple):
    """What the configuration orders."""

    limits: Limits
    updates: int
    push_every: int
    tau: int
    when_stale: str
    wait_deadline_s: float
    on_push: str
    samplers: int
    slots: int
    """Requests that decode at once in one sampler."""
    max_tokens: float
    """Most sampled tokens of a trajectory."""

    @property
    def batch(self) -> int:
        """Trajectories of an update."""
        return self.limits.group_size * self.limits.groups_per_update


def job_of(config: RunConfig, limits: Limits) -> Job:
    """The job of `config`, whose orchestrator has these limits."""
    own, rollout = config.trainer, config.rollout
    return Job(
        limits,
        own.updates,
        own.push_every,
        config.staleness.tau,
        config.staleness.when_stale,
        config.staleness.wait_deadline_s,
        config.sampler.on_push,
        config.processes.samplers,
        config.sampler.slots,
        min(rollout.max_new_tokens * rollout.max_turns, config.sampler.max_context),
    )


def step_seconds(rates: SamplerRates, requests: float) -> float:
    """Of a decode step of `requests` requests."""
    return rates.step_s + rates.row_s * requests


def turns_of(rates: RolloutRates, tokens: float) -> int:
    """Turns of a trajectory of so many sampled tokens."""
    return max(1, round(tokens / rates.tokens_per_turn))


def checked(source: str, table: Mapping[str, Any]) -> Rates:
    """The rates in `table`; UserError, in one line, naming the source and the key."""
    try:
        return Rates.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error, Rates)[1]}") from None


def with_assumptions(
    table: Mapping[str, Mapping[str, Any]], assumed: Sequence[str]
) -> dict[str, Any]:
    """`table` with each "section.key=number" of `assumed` put in; UserError naming a wrong one."""
    sections = {"rollout": RolloutRates, "sampler": SamplerRates, "trainer": TrainerRates}
    known = [f"{name}.{key}" for name, own in sections.items() for key in own.model_fields]
    changed = {section: dict(values) for section, values in table.items()}
    for text in assumed:
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in known:
            raise UserError(f"--assume {text}: no rate {key!r}; there is {', '.join(known)}")
        section, name = key.split(".")
        try:
            changed.setdefault(section, {})[name] = float(value)
        except ValueError:
            raise UserError(f"--assume {text}: needs a number, as in {key}=0.5") from None
    return changed
