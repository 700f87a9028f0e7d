"""Curves by hand, and pictures of anything that is a loss."""

import subprocess
import sys

import numpy as np
import pytest

from rl_jax import losses
from rl_jax.losses import recipes
from rl_jax.losses.curves import weight_curve
from rl_jax.losses.ratios import current_over_behavior

ACROSS = np.float32([-2.0, -0.5, 0.0, 0.1, 1.0, 2.0])


@pytest.mark.parametrize(
    ("loss", "advantage", "want"),
    [
        (recipes.dis(0.3, 5.0), 1.0, [0, 0, 1, np.exp(0.1), np.e, 0]),
        (recipes.dis(0.3, 5.0), -3.0, [0, 0, 1, np.exp(0.1), np.e, 0]),
        (recipes.dapo(), 1.0, [np.exp(-2), np.exp(-0.5), 1, np.exp(0.1), 0, 0]),
        (recipes.dapo(), -1.0, [0, 0, 1, np.exp(0.1), np.e, np.exp(2)]),
        (recipes.cispo(), 1.0, [np.exp(-2), np.exp(-0.5), 1, np.exp(0.1), 1.2, 1.2]),
        (recipes.dppo(tau=1e-9), 1.0, [np.exp(-2), np.exp(-0.5), 1, np.exp(0.1), np.e, 0]),
        (recipes.m2po(0.5), 1.0, [np.exp(-2), np.exp(-0.5), 1, np.exp(0.1), 0, 0]),
    ],
)
def test_weights_across_the_log_ratio(
    loss: losses.Loss, advantage: float, want: list[float]
) -> None:
    # At log mu = -3, log-ratio 2 moves the probability by 0.318, log-ratio 1 by 0.086.
    got = weight_curve(loss.transform, ACROSS, advantage, behavior=-3.0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_picture_has_a_panel_per_sign_and_a_line_per_loss() -> None:
    figure = losses.plot({"DIS": recipes.dis(), "GSPO": recipes.gspo()}, log_ratio=(-1.0, 1.0))
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["advantage > 0", "advantage < 0"]
    for axes in panels:
        assert [line.get_label() for line in axes.lines[:2]] == ["DIS", "GSPO"]
    x, y = panels[1].lines[0].get_data()
    want = weight_curve(recipes.dis().transform, np.asarray(x), -1.0)
    np.testing.assert_array_equal(y, want)


def test_a_bare_transform_can_be_drawn() -> None:
    bare = losses.chain(current_over_behavior(), losses.importance_sampled())
    assert losses.plot(bare).axes[1].get_legend() is None


def test_pictures_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"plot: log_ratio must be \(low, high\)"):
        losses.plot(recipes.dis(), log_ratio=(1.0, 1.0))
    with pytest.raises(ValueError, match="probability above 1; give a behavior of at most -5"):
        losses.plot(recipes.dis(), log_ratio=(-1.0, 5.0))


def test_the_face_of_the_library_is_complete() -> None:
    assert all(hasattr(losses, name) for name in losses.__all__)
    assert callable(losses.plot)


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, rl_jax.losses; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
