"""[H] A run in one PNG: how well it solves, how stale its data is, who works when.

matplotlib is imported where it draws; it comes with the `report` extra.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from launch.summary import Interval, Summary, busy
from rl_jax.metrics import names

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, RED = "#2563a8", "#d9730d", "#b42318"
BINS = 240
"""Columns of the busy panel."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def utilisation(intervals: Sequence[Interval], edges: np.ndarray) -> np.ndarray:
    """float64[bins]: the share of each bin between ascending `edges` that `intervals` cover."""
    spans = busy(intervals)
    ends = np.array([0.0, *accumulate(end - start for start, end in spans)])
    knots = np.array([edge for span in spans for edge in span] or [0.0])
    covered = np.repeat(ends, 2)[1:-1] if spans else np.zeros(1)
    return np.diff(np.interp(edges, knots, covered)) / np.diff(edges)


def draw(
    path: Path,
    updates: Sequence[Mapping[str, Any]],
    summary: Summary,
    tau: int,
    busy_by_program: Mapping[str, Sequence[Interval]],
) -> None:
    """Writes the picture to `path`.

    `updates` are the lines of `metrics.jsonl` that speak of trainer updates, `busy_by_program` has
    the busy times of "trainer" and "sampler" in seconds since the run began.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, hspace=0.04)
    figure = Figure(figsize=(9, 9), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    solve, lag, lanes = figure.subplots(3, 1, height_ratios=(5, 3, 3))
    for axes in (solve, lag, lanes):
        _plain(axes)
    _solve_rate(solve, updates, summary)
    _lag(lag, updates, tau)
    lag.sharex(solve)
    _busy(lanes, busy_by_program, summary)
    facts = (
        f"seed {summary.seed}",
        f"{summary.steps} updates",
        f"{summary.versions_published} pushes",
        f"{summary.trained_tokens:,} tokens trained",
        f"{summary.wall_seconds:.0f} s",
    )
    figure.suptitle("  ·  ".join(facts), fontsize=10, color=MUTED)
    figure.savefig(path, format="png")


def _plain(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _title(axes: Any, title: str, more: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_title(more, loc="right", fontsize=9, color=MUTED, pad=8)


def _series(updates: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(step, value) of the updates that have the metric `name`."""
    told = [(u[names.STEP], u[name]) for u in updates if u.get(name) is not None]
    steps, values = zip(*told, strict=True) if told else ((), ())
    return np.array(steps, float), np.array(values, float)


def _solve_rate(axes: Any, updates: Sequence[Mapping[str, Any]], summary: Summary) -> None:
    steps, reward = _series(updates, names.REWARD)
    axes.plot(steps, reward, "o", color=BLUE, markersize=3, alpha=0.35, markeredgewidth=0)
    mean = list(accumulate(reward, lambda m, r: 0.8 * m + 0.2 * r))
    axes.plot(steps, mean, color=BLUE, linewidth=2)
    ends = [0, summary.steps]
    held_out = [summary.solve_rate_before, summary.solve_rate_after]
    axes.plot(ends, held_out, "D", color=ORANGE, markersize=8, zorder=3, clip_on=False)
    axes.plot(ends, held_out, ":", color=ORANGE, linewidth=1.2)
    below = {"textcoords": "offset points", "va": "top", "color": ORANGE, "fontweight": "bold"}
    for x, rate, shift, side in zip(ends, held_out, (-4, 4), ("left", "right"), strict=True):
        axes.annotate(f"{rate:.2f}", (x, rate), xytext=(shift, -12), ha=side, fontsize=13, **below)
    axes.set_ylim(0, 1.05)
    axes.set_xlim(-0.5, max(summary.steps, 1) + 0.5)
    _title(axes, "Solve rate", "blue: training reward,  orange: held-out questions, greedy")


def _lag(axes: Any, updates: Sequence[Mapping[str, Any]], tau: int) -> None:
    steps, largest = _series(updates, names.LAG_MAX)
    axes.fill_between(steps, largest, step="mid", color=BLUE, alpha=0.15, linewidth=0)
    axes.step(steps, largest, where="mid", color=BLUE, linewidth=1, alpha=0.6)
    axes.plot(*_series(updates, names.LAG_MEAN), color=BLUE, linewidth=2)
    axes.axhline(tau, color=RED, linewidth=1.2, linestyle="--")
    axes.annotate(
        f"τ = {tau}", (1, tau), xycoords=("axes fraction", "data"), xytext=(0, -5), ha="right",
        va="top", textcoords="offset points", color=RED, fontsize=9,
    )  # fmt: skip
    axes.set_ylim(0, max(tau, *largest, 0) * 1.15)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("update", color=MUTED, fontsize=9)
    _title(axes, "Lag of the tokens trained on, in pushes", "line: mean, area: largest")


def _busy(axes: Any, by_program: Mapping[str, Sequence[Interval]], summary: Summary) -> None:
    end = max((i[1] for spans in by_program.values() for i in spans), default=1.0)
    edges = np.linspace(0, end, BINS + 1)
    lanes = (("sampler", BLUE), ("trainer", ORANGE))
    for lane, (program, color) in enumerate(lanes):
        share = utilisation(by_program.get(program, ()), edges)
        base = 1.2 * lane
        axes.axhspan(base, base + 1, color=color, alpha=0.07, linewidth=0)
        axes.stairs(base + share, edges, baseline=base, fill=True, color=color, alpha=0.75)
        axes.axhline(base, color=MUTED, linewidth=0.6)
    axes.set_yticks([0.5, 1.7], [name for name, _ in lanes], fontsize=10)
    for label, (_, color) in zip(axes.get_yticklabels(), lanes, strict=True):
        label.set_color(color)
    axes.grid(visible=False)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 2.25)
    axes.set_xlabel("seconds since the run began", color=MUTED, fontsize=9)
    both = summary.overlap_seconds / max(summary.trainer_busy_seconds, 1e-9)
    _title(
        axes,
        "Busy share of each program's devices",
        f"sampler works during {both:.0%} of the trainer's time",
    )
