"""[H] The rates that a run had, and how a forecast from them compares with what the run did."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np

from launch.code import config_of
from launch.plan.forecast import Forecast
from launch.plan.inputs import TOOL_SIGMA, Rates, RolloutRates, SamplerRates, TrainerRates
from launch.plan.measured import Window, measure, steps_of, waited
from launch.report.data import entries, lines, originals, spans
from launch.report.numbers import Lines
from rl_jax.config.base import UserError
from rl_jax.config.load import lines as toml_lines
from rl_jax.config.run import RunConfig
from rl_jax.metrics import names
from rl_jax.metrics.trace import PUSH, Span
from rl_jax.replay import events
from rl_jax.replay.fates import Kind, Recorded
from rl_jax.trajectories.types import Origin, Trajectory

ROLLOUTS, DECODE = "rollouts", "decode"
"""A track and a label of the traces."""


@dataclass(frozen=True)
class Fit:
    """What a run was like between its first rollout and its last update."""

    config: RunConfig
    rates: Rates
    measured: Forecast
    updates: int


def fit(run_dir: Path) -> Fit:
    """Reads `run_dir`; UserError where it is no run, has no traces or made no update."""
    config = config_of(run_dir)
    told = [entry.event for entry in entries(run_dir)]
    traced, updates = spans(run_dir), lines(run_dir)
    rollouts = [span for span in traced if span.track == ROLLOUTS]
    if not rollouts or not updates:
        lacking = "no update" if rollouts else "no trace of its rollouts"
        raise UserError(f"{run_dir}: {lacking} on record, so there is nothing to fit rates to")
    recorded = [r for r in originals(run_dir, told) if r.fate.kind is not Kind.EVALUATED]
    window = Window(min(span.start for span in rollouts), updates[-1][names.WALL_SECONDS])
    inside = [s for s in traced if s.end > window.begin and s.start < window.end]
    rates = Rates(
        rollout=_rollout(config, recorded),
        sampler=_sampler(inside, recorded, told, window),
        trainer=_trainer(updates, inside, recorded, window.begin),
    )
    return Fit(config, rates, measure(updates, inside, recorded, told, window), len(updates))


def rates_text(rates: Rates, comments: Iterable[str]) -> str:
    """A rates file: TOML after one line for each comment."""
    table = "\n".join(toml_lines(rates.model_dump())).strip()
    return "\n".join([*(f"# {comment}" for comment in comments), table]) + "\n"


def _rollout(config: RunConfig, recorded: Sequence[Recorded]) -> RolloutRates:
    whole = [r.trajectory for r in recorded if r.trajectory.valid and r.trajectory.loss_mask.any()]
    sampled = np.array([t.loss_mask.sum() for t in whole], float)
    turns = sum(max(t.turns, 1) for t in whole)
    prompts = np.array([t.loss_mask.argmax() for t in whole], float)
    answers = sum(len(t.tokens) for t in whole) - sampled.sum() - prompts.sum()
    logs = np.log(sampled)
    failed = sum(r.fate.kind is Kind.FAILED for r in recorded)
    return RolloutRates(
        sampled_tokens=float(sampled.mean()),
        sigma=float(logs.std()),
        same_in_group=_common_share(whole, logs),
        tokens_per_turn=float(sampled.sum() / turns),
        prompt_tokens=float(prompts.mean()),
        answer_tokens=float(answers / max(turns - len(whole), 1)),
        tool_median_s=config.task.tool_latency_median_s,
        tool_sigma=TOOL_SIGMA,
        failed_share=failed / len(recorded),
    )


def _common_share(whole: Sequence[Trajectory], logs: np.ndarray) -> float:
    """Of the variance of `logs`, the part that is between prompts."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for trajectory, value in zip(whole, logs, strict=True):
        by_prompt[trajectory.key.prompt].append(value)
    several = [np.var(own, ddof=1) for own in by_prompt.values() if len(own) > 1]
    if not several or not logs.var():
        return 0.0
    return float(np.clip(1 - np.mean(several) / logs.var(), 0.0, 1.0))


def _sampler(
    inside: Sequence[Span],
    recorded: Sequence[Recorded],
    told: Sequence[events.Event],
    window: Window,
) -> SamplerRates:
    """A decode step takes the same time however full it is, as its compiled shape does."""
    samplers = steps_of(inside, "sampler")
    steps = [span for own in samplers for span in own]
    overhead = fmean(map(_short_gaps, samplers))
    decode = [span.end - span.start for span in steps if span.name == DECODE]
    prefill = [span.end - span.start for span in steps if span.name.startswith("prefill")]
    segments = (s for r in recorded for s in r.trajectory.segments)
    prefilled = sum(s.end - s.start for s in segments if s.origin is not Origin.DECODE)
    lost = sum(_is_loss(event) for event in told)
    hours = window.seconds / 3600 * len(samplers)
    # A version's first step is told with the pause before it; version 0 had nothing to swap.
    pauses = [e.pause_s for e in told if isinstance(e, events.VersionApplied) and e.version]
    return SamplerRates(
        step_s=fmean(decode or prefill) + overhead,
        prefill_tokens_per_s=prefilled / (sum(prefill) + overhead * len(prefill)),
        swap_s=fmean(pauses or [0.0]),
        losses_per_hour=lost / hours,
    )


def _short_gaps(steps: Sequence[Span]) -> float:
    """Mean seconds between two steps, of the gaps that are shorter than a step: others are not the
    host's but times without work."""
    usual = median(step.end - step.start for step in steps)
    gaps = [b.start - a.end for a, b in pairwise(steps)]
    return max(0.0, fmean([gap for gap in gaps if gap < usual] or [0.0]))


def _is_loss(event: events.Event) -> bool:
    return (
        isinstance(event, events.ProcessEnded)
        and event.role.startswith("sampler")
        and event.code != 0
    )


def _trainer(
    updates: Lines, inside: Sequence[Span], recorded: Sequence[Recorded], began: float
) -> TrainerRates:
    trained = [r.trajectory for r in recorded if r.fate.kind is Kind.TRAINED]
    stepping = sum(update[names.STEP_SECONDS] for update in updates)
    pushes = [u[names.PUSH_SECONDS] for u in updates if u[names.PUSH_SECONDS]]
    whole = updates[-1][names.WALL_SECONDS] - began - waited(updates, began)
    published = [s.end - s.start for s in inside if s.name == PUSH and s.args.get("version")]
    return TrainerRates(
        tokens_per_s=sum(len(t.tokens) for t in trained) / stepping,
        update_s=max(0.0, whole - stepping - sum(pushes)) / len(updates),
        push_s=fmean(pushes or [0.0]),
        publish_s=fmean(published or [0.0]),
    )
