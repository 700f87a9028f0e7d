"""Chains: order, names, states and statistics."""

import jax.numpy as jnp
import pytest

from rl_jax.losses.combine import chain, token_weights, weighted_sum
from rl_jax.losses.evaluate import start
from rl_jax.losses.masks import mask_stale, two_sided_mask
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, stateless
from tests.losses.terms import applied, running_count, scores

GIVEN = scores([-1.0, -1.0], [-1.0, -1.0])


def affine(slope: float, offset: float, needs: frozenset[str] = frozenset()) -> LossTransform:
    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        return terms._replace(factor=terms.factor * slope + offset), {}

    return stateless("affine", apply, needs)


def test_transforms_apply_in_order() -> None:
    terms, _ = applied(chain(affine(3.0, 0.0), affine(1.0, 2.0)), GIVEN)
    assert terms.factor.tolist() == [[5.0, 5.0]]
    terms, _ = applied(chain(affine(1.0, 2.0), affine(3.0, 0.0)), GIVEN)
    assert terms.factor.tolist() == [[9.0, 9.0]]


def test_needs_are_those_of_all_parts() -> None:
    both = chain(affine(1, 0, frozenset({"value"})), affine(1, 0, frozenset({"entropy"})))
    assert both.needs == {"value", "entropy"}


def test_one_metric_name_twice_is_an_error() -> None:
    twice = chain(current_over_behavior(), two_sided_mask(0.3, 5.0), current_over_behavior())
    with pytest.raises(ValueError, match=r"'ratio/.* is reported by current_over_behavior and by"):
        applied(twice, GIVEN)


def test_chains_nest() -> None:
    parts = current_over_behavior(), two_sided_mask(0.3, 5.0), policy_gradient()
    flat, _ = applied(chain(*parts), GIVEN)
    nested, _ = applied(chain(chain(*parts[:2]), chain(parts[2])), GIVEN)
    assert (flat.loss == nested.loss).all()


def test_without_statistics_there_is_no_first_pass() -> None:
    assert chain(policy_gradient()).stats is None


def test_statistics_and_state_reach_their_own_transform() -> None:
    both = chain(policy_gradient(), chain(running_count()))
    assert both.stats is not None
    stats, state = both.stats(GIVEN), both.init()
    terms, metrics = both.apply(GIVEN, start(GIVEN), stats, state)
    assert terms.factor.tolist() == [[0.5, 0.5]]
    assert float(metrics["seen"].compute()) == 10.0
    state = both.advance(state, stats)
    _, metrics = both.apply(GIVEN, start(GIVEN), stats, state)
    assert float(metrics["seen"].compute()) == 12.0


def test_a_mask_in_front_of_a_weighted_sum_holds_for_its_parts() -> None:
    given = scores([-1.0, -1.0], -1.0, lag=[0, 5])
    both = weighted_sum(a=(2.0, policy_gradient()), b=(3.0, policy_gradient()))
    terms, _ = applied(chain(mask_stale(3), both), given)
    assert terms.kept.tolist() == [[True, False]]
    assert terms.loss.tolist() == [[5.0, 0.0]]
    doubled = token_weights(lambda own: jnp.full_like(own.current, 2.0))
    assert applied(chain(doubled, both), given)[0].loss.tolist() == [[10.0, 10.0]]


def test_a_weighted_sum_adds_to_what_was_there() -> None:
    parts = policy_gradient(name="first"), weighted_sum(a=(2.0, policy_gradient()))
    assert applied(chain(*parts), GIVEN)[0].loss.tolist() == [[3.0, 3.0]]
