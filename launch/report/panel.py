"""[H] One panel of a report: how it looks, and its way into a page.

matplotlib comes with the `report` extra and is imported where it draws.
"""

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launch.picture import BLUE, GRID, INK, MUTED, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREEN, PURPLE = "#2f855a", "#7c4d9e"
COLORS: Mapping[str, str] = {
    "ink": INK, "muted": MUTED, "grid": GRID, "blue": BLUE, "orange": ORANGE, "red": RED,
    "green": GREEN, "purple": PURPLE,
}  # fmt: skip
"""Each becomes the page's CSS variable of that name, so a dark page can have others."""

WIDTH, HEIGHT = 4.6, 2.7
"""Inches."""


def panel(title: str, x_label: str, *, height: float = HEIGHT) -> tuple["Figure", Any]:
    """A figure and its axes, empty but for title and label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=7)
    axes.set_xlabel(x_label, color=MUTED, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(compact)
    return figure, axes


def legend(axes: Any, **options: Any) -> None:
    """Names in the colours of what they name."""
    axes.legend(
        frameon=False, fontsize=8.5, labelcolor="linecolor", handlelength=1.2, borderpad=0.1,
        handletextpad=0.5, borderaxespad=0.2, **options,
    )  # fmt: skip


def plain(text: str, limit: int) -> str:
    """At most `limit` characters that mean nothing to matplotlib."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    return shown.replace("$", r"\$")


def compact(value: float, _: float = 0.0) -> str:
    """A tick's text: 1500 is 1.5k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def percent(value: float, _: float = 0.0) -> str:
    """A tick's text: 0.125 is 12.5%."""
    return f"{round(100 * value, 3):g}%"


def svg(figure: "Figure") -> str:
    """An `<svg>` element for a page: text as text, colours as the page's variables."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for name, color in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    return text
