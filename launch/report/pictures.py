"""[H] The pictures of a report: small panels that a page lays out side by side or in a column.

They draw what `numbers` computed and compute nothing themselves.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from launch.picture import BLUE, GRID, INK, MUTED, ORANGE, RED, utilisation
from launch.report import numbers
from launch.report.data import RunData
from launch.report.numbers import Clocks, Lines
from launch.report.panel import GREEN, HEIGHT, PURPLE, compact, legend, panel, percent, plain
from rl_jax.metrics import names
from rl_jax.replay.fates import Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 300
"""More updates than that are drawn as means of equal runs of them."""
BARS = 80
LANE_BINS = 160


class Picture(NamedTuple):
    title: str
    look_for: str
    """One sentence."""
    panels: tuple["Figure", ...]


def pictures(run: RunData) -> list[Picture]:
    """All that `run` has data for."""
    makers = (_learning, _lags, _bias, _fates, _waiting, _staleness, _throughput)
    return [picture for maker in makers if (picture := maker(run)) is not None]


def _thin(*columns: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(numbers.blocks(column, POINTS) for column in columns)


def _learning(run: RunData) -> Picture | None:
    told = [line for line in run.lines if line.get(names.REWARD) is not None]
    clocks, held = numbers.clocks(told), numbers.held_out(run.events)
    _, reward = numbers.series(told, names.REWARD)
    if not len(reward) and not held:
        return None
    clock_titles = ("Against updates", "Against tokens trained on", "Against time")
    units = ("update", "tokens", "seconds since the run began")
    panels = []
    for at, (title, unit) in enumerate(zip(clock_titles, units, strict=True)):
        figure, axes = panel(title, unit)
        x, dots, line = _thin(clocks[at], reward, numbers.smooth(reward))
        axes.plot(x, dots, "o", color=BLUE, markersize=3, alpha=0.35, markeredgewidth=0)
        axes.plot(x, line, color=BLUE, linewidth=2)
        _held_out(axes, clocks, held, at)
        axes.set_ylim(min([0.0, *reward]), max([1.05, *reward]))
        axes.set_xlim(left=0)
        panels.append(figure)
    return Picture(
        "Learning",
        "Blue: mean reward of each trained batch and its running mean; orange diamonds: solve rate "
        "on held-out prompts. Both should rise together: blue alone is memorised prompts.",
        tuple(panels),
    )


def _held_out(axes: Any, clocks: Clocks, held: Sequence[numbers.HeldOut], at: int) -> None:
    points = [(clocks.at(h.update)[at], h.rate) for h in held]
    x, y = np.array(points).reshape(-1, 2).T
    axes.plot(x, y, "D:", color=ORANGE, markersize=6, linewidth=1.2, clip_on=False)
    ends = {0: points[0], -1: points[-1]} if points else {}
    for end, (x, rate) in ends.items():
        above = 8 if rate < 0.88 else -17
        axes.annotate(
            f"{rate:.2f}", (x, rate), xytext=(-3 if end else 3, above), color=ORANGE, fontsize=11,
            textcoords="offset points", ha="right" if end else "left", fontweight="bold",
        )  # fmt: skip


def _lags(run: RunData) -> Picture | None:
    lags = numbers.lag_tokens(run.rows, run.events)
    if not lags:
        return None
    figure, axes = panel("Share of trained tokens by lag", "pushes between sampling and training")
    total = sum(lags.values())
    bars = axes.bar(list(lags), [n / total for n in lags.values()], color=BLUE, width=0.72)
    axes.bar_label(bars, [f"{n / total:.1%}" for n in lags.values()], fontsize=9, color=INK)
    axes.yaxis.set_major_formatter(percent)
    axes.margins(y=0.14)
    _integers(axes.xaxis, lags)
    if run.tau is not None:
        axes.axvline(run.tau + 0.5, color=RED, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"bound τ = {run.tau}", (run.tau + 0.5, 1), xycoords=("data", "axes fraction"),
            xytext=(-5, -3), textcoords="offset points", ha="right", va="top", color=RED,
            fontsize=9,
        )  # fmt: skip
    over, axes = panel("Lag over updates, in pushes", "update")
    steps, largest = map(_thinned, numbers.series(run.lines, names.LAG_MAX))
    axes.fill_between(steps, largest, step="mid", color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(*_thin(*numbers.series(run.lines, names.LAG_MEAN)), color=BLUE, linewidth=1.8)
    if run.tau is not None:
        axes.axhline(run.tau, color=RED, linewidth=1.2, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    return Picture(
        "Lag",
        "How many pushes old a token was when it was trained on: nothing may lie beyond the red "
        "line, and mean (line) and largest (area) should not grow over the run.",
        (figure, over),
    )


def _thinned(values: np.ndarray) -> np.ndarray:
    return numbers.blocks(values, POINTS)


def _integers(axis: Any, values: Any) -> None:
    top = max(values)
    axis.set_ticks(np.arange(0.0, top + 1, max(1, top // 10)))


def _bias(run: RunData) -> Picture | None:
    lengths = numbers.lengths(run.rows)
    if not len(lengths.offered):
        return None
    return Picture(
        "Trained against offered",
        "What the staleness policy leaves out: where blue and orange part, some lengths or tasks "
        "are trained on less than they were sampled.",
        (_lengths(lengths), _labels(numbers.label_shares(run.rows))),
    )


def _lengths(lengths: numbers.Lengths) -> "Figure":
    side = "longer" if lengths.difference > 0 else "shorter"
    title = f"Lengths: trained are {abs(lengths.difference):.1%} {side}"
    figure, axes = panel(title if len(lengths.trained) else "Lengths", "tokens of a trajectory")
    low, high = lengths.offered.min(), lengths.offered.max() + 1
    edges = np.linspace(low, high, min(24, int(high - low)) + 1)
    shown = zip(("offered", "trained"), (lengths.offered, lengths.trained), strict=True)
    for (name, values), color, mean in zip(
        shown, (ORANGE, BLUE), reversed(lengths.means), strict=True
    ):
        if not len(values):
            continue
        counts = np.histogram(values, edges)[0] / len(values)
        axes.stairs(counts, edges, color=color, linewidth=1.8, label=f"{name}, mean {mean:.1f}")
        axes.stairs(counts, edges, color=color, alpha=0.12, fill=True)
        axes.axvline(mean, color=color, linewidth=1.2, linestyle="--")
    axes.yaxis.set_major_formatter(percent)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.3)
    legend(axes, loc="upper right")
    return figure


def _labels(shares: Sequence[numbers.LabelShare]) -> "Figure":
    shown = sorted(sorted(shares, key=lambda s: -s.offered)[:12], key=lambda s: s.label)
    height = max(HEIGHT, 0.9 + 0.3 * len(shown))
    figure, axes = panel("Share of trajectories by label", "", height=height)
    y = np.arange(len(shown))[::-1]
    axes.barh(y + 0.19, [s.offered for s in shown], 0.34, color=ORANGE, label="offered")
    axes.barh(y - 0.19, [s.trained for s in shown], 0.34, color=BLUE, label="trained")
    for at, share in zip(y, shown, strict=True):
        points = 100 * (share.trained - share.offered)
        axes.annotate(
            f"{points:+.1f} pp", (max(share.trained, share.offered), at),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5, color=MUTED,
        )  # fmt: skip
    axes.set_yticks(y, [plain(s.label, 22) for s in shown], color=INK)
    _sideways(axes)
    axes.xaxis.set_major_formatter(percent)
    legend(axes, loc="lower center", ncols=2, bbox_to_anchor=(0.5, -0.26))
    return figure


def _sideways(axes: Any) -> None:
    axes.grid(visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.margins(x=0.16)


KIND_COLORS = {
    Kind.TRAINED: BLUE, Kind.DROPPED: RED, Kind.DISCARDED: ORANGE, Kind.FAILED: PURPLE,
    Kind.EVALUATED: GREEN, Kind.OPEN: MUTED,
}  # fmt: skip


def _fates(run: RunData) -> Picture | None:
    lines = numbers.fates(run.rows)[:10]
    if not lines:
        return None
    height = max(2.0, 0.8 + 0.42 * len(lines))
    panels = []
    for title, counts in (
        ("Trajectories", [line.trajectories for line in lines]),
        ("Sampled tokens", [line.tokens for line in lines]),
    ):
        figure, axes = panel(title, "", height=height)
        y = np.arange(len(lines))[::-1]
        bars = axes.barh(y, counts, 0.42, color=[KIND_COLORS[line.kind] for line in lines])
        axes.bar_label(bars, [f"{n:,}" for n in counts], padding=3, fontsize=9, color=INK)
        for at, line in zip(y, lines, strict=True):
            text = f"{line.kind}: {line.reason}" if line.reason else str(line.kind)
            axes.annotate(
                plain(text, 52), (0, at + 0.27), fontsize=8.5, color=MUTED, va="bottom",
            )  # fmt: skip
        axes.set_yticks([])
        axes.set_ylim(-0.4, len(lines) - 0.3)
        _sideways(axes)
        axes.set_xlim(left=0)
        panels.append(figure)
    return Picture(
        "What became of the trajectories",
        "Every trajectory sampled, by its fate and the reason for it (N stands for any number): "
        "dropped, discarded and failed ones are sampling that taught nothing.",
        tuple(panels),
    )


def _waiting(run: RunData) -> Picture | None:
    waits = numbers.waits(run.lines)
    if not len(waits.updates):
        return None
    panels = (_trainer_time(waits), *_lanes(run))
    return Picture(
        "Who waited for whom",
        "Red in the trainer's time is waiting for data: sample faster; gaps in the sampler's "
        "lane are waiting for the trainer or for tools: raise rollout.ahead or rollout.in_flight.",
        panels,
    )


def _trainer_time(waits: numbers.Waits) -> "Figure":
    shares = waits.shares
    figure, axes = panel("Trainer's seconds an update", "update")
    updates = numbers.blocks(waits.updates, BARS)
    width = float(np.diff(updates).min()) * 0.85 if len(updates) > 1 else 0.85
    base = np.zeros(len(updates))
    for name, text, color in (
        ("step", "steps", BLUE), ("push", "pushes", GREEN), ("wait", "waits for data", RED),
        ("rest", "else", MUTED),
    ):  # fmt: skip
        part = numbers.blocks(getattr(waits, name), BARS)
        label = f"{text} {shares[name]:.0%}"
        axes.bar(updates, part, width, bottom=base, color=color, label=label, linewidth=0)
        base = base + part
    axes.set_ylim(0, 1.25 * max(base.max(), 1e-9))
    legend(axes, loc="upper right", ncols=4, columnspacing=0.9)
    return figure


def _lanes(run: RunData) -> tuple["Figure", ...]:
    working = [s for s in run.spans if s.name != "wait"]
    lanes = sorted({(s.process, s.track) for s in working}, key=lambda x: (x[0] != "trainer", x))
    if not lanes:
        return _shares_busy(run.lines)
    lanes = lanes[:8]
    height = max(HEIGHT, 0.9 + 0.45 * len(lanes))
    figure, axes = panel("Busy share by device", "seconds since the run began", height=height)
    edges = np.linspace(0, max(s.end for s in working), LANE_BINS + 1)
    for at, (process, track) in enumerate(reversed(lanes)):
        own = [(s.start, s.end) for s in working if (s.process, s.track) == (process, track)]
        color = ORANGE if process == "trainer" else BLUE
        base = 1.25 * at
        axes.axhspan(base, base + 1, color=color, alpha=0.08, linewidth=0)
        axes.stairs(
            base + utilisation(own, edges), edges, baseline=base, fill=True, color=color, alpha=0.8
        )
    ticks = [1.25 * at + 0.5 for at in range(len(lanes))]
    axes.set_yticks(ticks, [plain(f"{p} {t}", 24) for p, t in reversed(lanes)], fontsize=8.5)
    axes.grid(visible=False)
    axes.set_xlim(0, edges[-1])
    return (figure,)


def _shares_busy(lines: Lines) -> tuple["Figure", ...]:
    return _curves(
        "Busy share since the last update",
        (
            ("trainer", ORANGE, numbers.series(lines, names.TRAINER_BUSY_SHARE)),
            ("sampler", BLUE, numbers.series(lines, names.SAMPLER_BUSY_SHARE)),
        ),
        percent,
    )


def _staleness(run: RunData) -> Picture | None:
    panels = _curves(
        "Effective sample size",
        (("ESS / tokens", BLUE, numbers.series(run.lines, names.ESS_SHARE)),),
        percent,
    ) + _curves(
        "Tokens without gradient",
        (("outside the band", RED, numbers.series(run.lines, names.MASKED_SHARE)),),
        percent,
    )
    if not panels:
        return None
    return Picture(
        "What staleness costs",
        "The share of a batch that its importance weights leave effective, and of tokens whose "
        "ratio left the trust band: the first falling or the second rising means data too old.",
        panels,
    )


def _throughput(run: RunData) -> Picture | None:
    panels = _curves(
        "Tokens per second",
        (
            ("sampled", BLUE, numbers.series(run.lines, names.SAMPLER_TOKENS_PER_SECOND)),
            ("trained", ORANGE, numbers.trained_per_second(run.lines)),
        ),
        compact,
    ) + _curves(
        "Groups in the queue",
        (("queue", BLUE, numbers.series(run.lines, names.QUEUE_DEPTH)),),
        compact,
    )
    if not panels:
        return None
    return Picture(
        "Throughput",
        "Sampled and trained should keep the same pace: a queue that grows is data growing old, an "
        "empty one a trainer about to wait.",
        panels,
    )


Curve = tuple[str, str, tuple[np.ndarray, np.ndarray]]


def _curves(
    title: str, curves: Sequence[Curve], format_y: Callable[[float, int], str]
) -> tuple["Figure", ...]:
    """One panel of curves over updates; none where no curve has a point."""
    told = [curve for curve in curves if len(curve[2][0])]
    if not told:
        return ()
    figure, axes = panel(title, "update")
    for name, color, points in told:
        axes.plot(*_thin(*points), color=color, linewidth=1.6, label=name)
    axes.yaxis.set_major_formatter(format_y)
    low, high = axes.get_ylim()
    # Narrower, and labels of whole percents would repeat.
    low = min(low, high - 0.05)
    axes.set_ylim(0 if low < 0.6 * high else low, high + 0.18 * (high - low))
    if len(told) > 1:
        legend(axes, loc="upper right", ncols=2)
    return (figure,)
