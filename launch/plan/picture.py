"""[H] A forecast in one PNG: the lag of a simulated run, and what another concurrency would give.

matplotlib is imported where it draws; it comes with the `report` extra.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.plan.closed import closed_form
from launch.plan.inputs import Job, Rates
from launch.plan.simulate import Trace

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, RED = "#2563a8", "#d9730d", "#b42318"
SHARES = (0.125, 0.177, 0.25, 0.354, 0.5, 0.707, 1.0, 1.41, 2.0, 2.83, 4.0)
"""Of the configuration's rollouts in flight."""


class Point(NamedTuple):
    """What so many rollouts in flight would give, by the closed form."""

    in_flight: int
    tokens_per_s: float
    lag_mean: float
    trainer_idle: float
    sampler_idle: float


def sweep(job: Job, rates: Rates) -> list[Point]:
    """The closed form over `in_flight`, all else as it is."""
    size = job.limits.group_size
    told = []
    for share in SHARES:
        count = max(size, round(job.limits.in_flight * share))
        found = closed_form(job._replace(limits=job.limits._replace(in_flight=count)), rates)
        told.append(
            Point(count, found.tokens_per_s, found.lag_mean, found.trainer_idle, found.sampler_idle)
        )
    return told


def draw(path: Path, job: Job, rates: Rates, trace: Trace) -> None:
    """Writes the picture to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, hspace=0.06)
    figure = Figure(figsize=(9, 9), dpi=130, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    lag, speed, idle = figure.subplots(3, 1)
    for axes in (lag, speed, idle):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, labelsize=9)
    _lag(lag, job, trace)
    points = sweep(job, rates)
    _speed(speed, job, points)
    _idle(idle, job, points)
    figure.savefig(path, format="png")


def _lag(axes: Any, job: Job, trace: Trace) -> None:
    steps = range(1, len(trace.updates) + 1)
    axes.step(steps, [u.lag_max for u in trace.updates], color=BLUE, alpha=0.4, where="mid")
    axes.step(steps, [u.lag_mean for u in trace.updates], color=BLUE, linewidth=1.8, where="mid")
    axes.axhline(job.tau, color=RED, linestyle="--", linewidth=1.2)
    axes.set_ylim(bottom=0)
    _label(axes, "Lag of tokens: mean and (faint) largest, simulated; dashed: tau", "update",
           "pushes")  # fmt: skip


def _speed(axes: Any, job: Job, points: Sequence[Point]) -> None:
    counts = [p.in_flight for p in points]
    axes.plot(counts, [p.tokens_per_s for p in points], color=BLUE, linewidth=2)
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="y", labelcolor=BLUE)
    other = axes.twinx()
    other.plot(counts, [p.lag_mean for p in points], color=ORANGE, linewidth=2)
    other.set_ylim(bottom=0)
    other.set_ylabel("mean lag, pushes", color=ORANGE, fontsize=9)
    other.tick_params(axis="y", labelcolor=ORANGE, labelsize=9)
    other.spines[["top"]].set_visible(False)
    _concurrency(axes, job)
    _label(
        axes, "Speed (blue) and lag (orange), closed form", "rollouts in flight", "trained tokens/s"
    )


def _idle(axes: Any, job: Job, points: Sequence[Point]) -> None:
    counts = [p.in_flight for p in points]
    for name, color in (("trainer", ORANGE), ("sampler", BLUE)):
        shares = [100 * getattr(p, f"{name}_idle") for p in points]
        axes.plot(counts, shares, color=color, linewidth=2, label=name)
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=9)
    _concurrency(axes, job)
    _label(axes, "Idle shares, closed form", "rollouts in flight", "% of the time")


def _concurrency(axes: Any, job: Job) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(job.limits.in_flight, color=MUTED, linestyle=":", linewidth=1.2)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.set_ylabel(y, color=MUTED, fontsize=9)
