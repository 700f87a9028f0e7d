"""[H] The picture: its arithmetic by hand, and that a run with holes in its data is drawn."""

from dataclasses import replace

import numpy as np
import pytest

from launch.picture import draw, utilisation
from launch.summary import Summary


def test_utilisation_by_hand():
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    got = utilisation([(0.5, 1.25), (1.0, 1.5), (3.0, 3.5)], edges)
    np.testing.assert_allclose(got, [0.5, 0.5, 0.25], atol=1e-12)


def test_utilisation_before_after_and_without_work():
    edges = np.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(utilisation([(-3.0, -1.0), (5.0, 6.0)], edges), [0, 0], atol=1e-12)
    np.testing.assert_array_equal(utilisation([], edges), [0, 0])
    np.testing.assert_allclose(utilisation([(-1.0, 9.0)], edges), [1, 1], atol=1e-12)


SUMMARY = Summary(0, 0.5, 0.8, {}, {}, 2, 1, 1, 10, 0, 1.0, 1.0, 0.5, None, 5.0)


@pytest.mark.parametrize(
    ("updates", "summary", "busy"),
    [
        ([{"step": 1, "reward": 0.5, "lag_mean": 0.5, "lag_max": 1}, {"step": 2, "reward": None}],
         SUMMARY, {"trainer": [(1.0, 2.0)], "sampler": [(0.0, 3.0)]}),
        ([], replace(SUMMARY, steps=0, trainer_busy_seconds=0.0), {}),
    ],
)  # fmt: skip
def test_draws(tmp_path, updates, summary, busy):
    import matplotlib.image

    draw(tmp_path / "p.png", updates, summary, 4, busy)
    image = matplotlib.image.imread(tmp_path / "p.png")
    assert image.shape[:2] == (1350, 1350)
    assert 0.01 < (image[..., :3].mean(-1) < 0.95).mean() < 0.5
