"""[N] Forecasts side by side, as a table for people and as JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.plan.forecast import Forecast
from launch.plan.inputs import Job, Rates

CLOSED, SIMULATED, MEASURED = "closed form", "simulated", "measured"


class Line(NamedTuple):
    """A row of the table."""

    label: str
    name: str
    """In `Forecast`."""
    form: str


LINES = (
    Line("trained tokens/s", "tokens_per_s", ",.1f"),
    Line("trainer idle", "trainer_idle", ".1%"),
    Line("samplers idle", "sampler_idle", ".1%"),
    Line("lag of a token, mean, pushes", "lag_mean", ".2f"),
    Line("lag of a start, mean", "lag_start", ".2f"),
    Line("lag of a start, by tokens", "lag_start_by_tokens", ".2f"),
    Line("lag of a start, 99th percentile", "lag_p99", ".2f"),
    Line("smallest tau that keeps it", "tau", "d"),
    Line("rollouts in flight", "in_flight", ".0f"),
    Line("groups dropped as stale", "dropped_share", ".1%"),
    Line("pushes, of the trainer's time", "trainer_push_share", ".2%"),
    Line("pushes, of a sampler's time", "sampler_push_share", ".2%"),
)
RATIOS = ("tokens_per_s", "lag_mean")
"""What a forecast is judged by."""
FEW = 0.01
"""A share of failed rollouts that no formula needs to know of."""


def to_text(head: str, columns: Mapping[str, Forecast], notes: Sequence[str]) -> str:
    """A table with a column for each forecast; where one is of a run, ratios to it follow."""
    lines = [head, " " * 36 + "".join(f"{name:>14}" for name in columns)]
    for line in LINES:
        cells = (format(getattr(own, line.name), line.form) for own in columns.values())
        lines.append(f"  {line.label:34}" + "".join(f"{cell:>14}" for cell in cells))
    if MEASURED in columns:
        lines += _ratios(columns)
    return "\n".join([*lines, *(f"  {note}" for note in notes)])


def _ratios(columns: Mapping[str, Forecast]) -> list[str]:
    measured = columns[MEASURED]
    told = []
    for line in (line for line in LINES if line.name in RATIOS):
        base = getattr(measured, line.name)
        cells = (
            f"{getattr(own, line.name) / base:.2f}" if base else "-" for own in columns.values()
        )
        label = f"{line.label.partition(',')[0]}, of measured"
        told.append(f"  {label:34}" + "".join(f"{cell:>14}" for cell in cells))
    return told


def to_plain(columns: Mapping[str, Forecast], rates: Rates) -> dict[str, Any]:
    """The forecasts by name, and the rates that they rest on."""
    told = {name: own._asdict() | {"tau": own.tau} for name, own in columns.items()}
    return {"rates": rates.model_dump(), **told}


def to_json(told: Mapping[str, Any]) -> str:
    """The text of what `to_plain` gives."""
    return json.dumps(told, indent=1)


def left_out(job: Job, rates: Rates, found: Forecast) -> list[str]:
    """Why the closed form of this job is not to be trusted."""
    own, reasons = rates.rollout, []
    if job.limits.ahead < 1:
        reasons.append("fewer than two updates' groups outstanding")
    if own.tool_sigma and own.tool_median_s * 4 > rates.sampler.step_s * own.tokens_per_turn:
        reasons.append("how tool times scatter")
    if job.when_stale != "mask" and found.lag_p99 > job.tau:
        reasons.append(f'what "{job.when_stale}" does to lags above tau')
    if own.failed_share > FEW or rates.sampler.losses_per_hour:
        reasons.append("failures")
    return reasons
