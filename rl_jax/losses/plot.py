"""[H] Pictures of losses.

matplotlib is imported where it draws; it comes with the `report` extra.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rl_jax.losses.curves import weight_curve
from rl_jax.losses.types import Loss, LossTransform

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLORS = ("#2563a8", "#d9730d", "#2f855a", "#b42318", "#6b46c1", "#0e7490", "#b7791f", "#4a5568")
POINTS = 1201


def plot(
    loss: Loss | LossTransform | Mapping[str, Loss | LossTransform],
    *,
    log_ratio: tuple[float, float] = (-3.0, 3.0),
    behavior: float = -4.0,
) -> "Figure":
    """Weight against log-ratio, one panel per sign of the advantage; see `weight_curve`.

    `loss` is a Loss, a transform or a chain, or several of them by the name they shall have in the
    picture. `log_ratio` is the range of log current - log behavior, `behavior` the log-probability
    that the sampler gave the token. Raises ValueError where that would need a probability above 1.
    """
    low, high = log_ratio
    if not low < high:
        raise ValueError(f"plot: log_ratio must be (low, high) with low < high, got {log_ratio}")
    if behavior + high > 0.0:
        raise ValueError(
            f"plot: at log-ratio {high} a token of log-probability {behavior} would have a "
            f"probability above 1; give a behavior of at most {-high}"
        )
    losses = loss if isinstance(loss, Mapping) else {"": loss}
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: needs matplotlib, which the extra `report` brings: pip install rl-jax[report]"
        ) from error

    figure = Figure(figsize=(10, 4), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    across = np.linspace(low, high, POINTS, dtype=np.float32)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
        for place, (name, each) in enumerate(losses.items()):
            transform = each.transform if isinstance(each, Loss) else each
            weights = weight_curve(transform, across, advantage, behavior=behavior)
            # The first are the widest: where curves agree, each is still seen.
            width = 4.0 - 2.5 * (place + 1) / len(losses)
            color = COLORS[place % len(COLORS)]
            axes.plot(across, weights, color=color, linewidth=width, label=name)
        _dress(axes, f"advantage {'> 0' if advantage > 0 else '< 0'}")
    panels[0].set_ylabel("weight: −∂loss/∂log p per unit advantage", color=INK)
    if any(losses):
        panels[1].legend(frameon=False, fontsize=9)
    return figure


def _dress(axes: "Axes", title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel("log-ratio: log π current − log π behavior", color=INK)
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    axes.axvline(0.0, color=MUTED, linewidth=0.8, linestyle=":")
    axes.grid(color=GRID)
    axes.tick_params(colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
