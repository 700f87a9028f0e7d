"""Pictures that the notebooks share."""

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INK, MUTED, BAR = "#1f2933", "#7b8794", "#2563a8"


def histogram(values: np.ndarray, edges: Sequence[float], label: str) -> Figure:
    """How many of `values` there are, on a log scale; `edges` are dashed lines."""
    figure, axes = plt.subplots(figsize=(8, 2.6), dpi=80, layout="constrained")
    axes.hist(values, bins=80, color=BAR)
    axes.set_yscale("log")
    for edge in edges:
        axes.axvline(edge, color="#b42318", linestyle="--", linewidth=1)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens")
    plt.close(figure)
    return figure


def tokens(
    texts: Sequence[str], names: Sequence[str], colors: Mapping[str, str], columns: int = 96
) -> Figure:
    """Tokens one after another, each on the colour of its name; a legend says the names."""
    lines, line, at = [], [], 0
    for text, name in zip(texts, names, strict=True):
        shown = text.replace("\n", "⏎") or " "
        if at + len(shown) > columns:
            lines, line, at = [*lines, line], [], 0
        line.append((at, shown, name))
        at += len(shown) + 1
    lines.append(line)
    figure, axes = plt.subplots(figsize=(10, 0.34 * len(lines) + 0.6), dpi=80)
    for row, line in enumerate(lines):
        for start, shown, name in line:
            box = {"boxstyle": "square,pad=0.15", "facecolor": colors[name], "edgecolor": "none"}
            axes.text(
                start, -row, shown, family="monospace", fontsize=9, color=INK, bbox=box, va="center"
            )
    axes.set_xlim(0, columns + 1)
    axes.set_ylim(-len(lines) + 0.4, 1.4)
    axes.axis("off")
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=handles, loc="upper left", ncols=len(colors), frameon=False, fontsize=9)
    plt.close(figure)
    return figure


def bars(
    names: Sequence[str], panels: Mapping[str, Sequence[float]], log: Collection[str] = ()
) -> Figure:
    """One panel of horizontal bars for each quantity, one bar for each name; those in `log` on a
    log scale."""
    size = (3.4 * len(panels), 0.3 * len(names) + 0.9)
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=size, dpi=80, sharey=True, layout="constrained"
    )
    for axes, (title, values) in zip(all_axes, panels.items(), strict=True):
        drawn = axes.barh(range(len(names)), values, color=BAR)
        axes.set_xscale("log" if title in log else "linear")
        axes.bar_label(drawn, fmt="%.2g", fontsize=8, color=MUTED, padding=2)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(len(names)), names)
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].invert_yaxis()
    plt.close(figure)
    return figure


def matrix(names: Sequence[str], values: np.ndarray) -> Figure:
    """A matrix of numbers from -1 to 1, with the numbers in it."""
    figure, axes = plt.subplots(figsize=(6.4, 5.6), dpi=80, layout="constrained")
    drawn = axes.imshow(values, cmap="RdBu", vmin=-1, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    for (i, j), value in np.ndenumerate(values):
        color = "white" if abs(value) > 0.6 else INK
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(drawn, shrink=0.8)
    plt.close(figure)
    return figure
