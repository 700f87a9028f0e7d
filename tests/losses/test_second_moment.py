"""M2PO's mask against a sort of the same tokens, and over any split of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.recipes import m2po
from rl_jax.losses.second_moment import second_moment_mask
from rl_jax.losses.types import Scores
from tests.losses.terms import applied, reported, scores


def batch(seed: int, scale: float) -> Scores:
    random = np.random.default_rng(seed)
    log_ratios = random.normal(scale=scale, size=400)
    advantages = random.choice([-1.0, 0.0, 1.0], size=400)
    return scores(log_ratios - 3.0, -3.0, advantages, mask=random.random(400) < 0.9)


def kept(given: Scores, threshold: float) -> np.ndarray:
    return np.asarray(applied(second_moment_mask(threshold), given)[0].kept)[0]


@pytest.mark.parametrize("scale", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("threshold", [0.04, 0.2])
def test_against_dropping_the_largest_one_by_one(scale: float, threshold: float) -> None:
    given = batch(0, scale)
    mask, advantages = np.asarray(given.mask)[0], np.asarray(given.advantages)[0]
    log_ratios = np.asarray(given.current - given.behavior, np.float64)[0]
    squared, pushed = log_ratios**2, mask & (log_ratios * advantages > 0)
    want = mask.copy()
    for token in np.argsort(-np.where(pushed, squared, -1.0)):
        if not pushed[token] or squared[want & pushed].mean() <= threshold:
            break
        want[token] = False
    got = kept(given, threshold)
    assert not got[~mask].any() and got[mask & ~pushed].all()
    # The cut is an edge: tokens within a bin (8 %) below the exact one may be dropped besides.
    assert not (got & ~want).any()
    missed = squared[want & ~got]
    exact = squared[want & pushed].max(initial=0.0)
    assert (missed > exact / 1.085).all()
    largest = squared[mask & pushed].max()
    if want[mask].all() and largest < 400:
        assert got[mask].all()
    if (got & pushed).any():
        assert squared[got & pushed].mean() <= threshold


def test_tokens_moved_against_their_advantage_stay() -> None:
    # (log d)^2: 1 and 4 pushed, 9 not, which stays and does not count.
    given = scores([1.0, -2.0, -3.0], 0.0, [1.0, -1.0, 1.0])
    assert kept(given, 0.5).tolist() == [False, False, True]
    assert kept(given, 1.1).tolist() == [True, False, True]
    assert kept(given, 1e-12).tolist() == [False, False, True]
    # 2.5 is the mean of both.
    assert kept(given, 2.6).tolist() == [True, True, True]
    assert reported(second_moment_mask(1.1), given) == pytest.approx(
        {
            "second_moment_mask/dropped": 1 / 3,
            "second_moment_mask/second_moment": 1.0,
            "ratio_mean": (np.exp(1) + np.exp(-2) + np.exp(-3)) / 3,
            "masked_share": 1 / 3,
            "ess/weight": 0.0,
            "ess/weight_squared": 0.0,
        }
    )


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    given, transform = batch(1, 1.0), m2po().transform
    parts = [
        Scores(*(jax.tree.map(lambda x, s=s: x[:, s], given)))
        for s in (slice(0, 60), slice(60, 400))
    ]
    assert transform.stats is not None
    whole = transform.stats(given)
    together = jax.tree.map(jnp.add, *[transform.stats(part) for part in parts])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, together)
    alone = evaluate(transform, given)[0].kept
    split = [evaluate(transform, part, together)[0].kept for part in parts]
    np.testing.assert_array_equal(alone, jnp.concatenate(split, axis=1))


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match="second_moment_mask: threshold must be positive and finite, got 0"
    ):
        second_moment_mask(0.0)
