"""[P] Metric states: values by hand, and the monoid laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.metrics.states import Max, Mean, compute, merge

numbers = st.lists(st.integers(-1000, 1000).map(float), max_size=6)


def test_mean_of_unequal_parts_is_not_the_mean_of_means():
    parts = Mean.of(jnp.array([1.0, 2.0, 3.0])).merge(Mean.of(jnp.array([10.0])))
    assert float(parts.compute()) == 4.0


def test_weights():
    mean = Mean.of(jnp.array([2.0, jnp.nan, 4.0]), jnp.array([3.0, 0.0, 1.0]))
    assert float(mean.compute()) == 2.5
    assert float(mean.count) == 4.0


def test_max_where():
    values = jnp.array([5.0, -2.0, 9.0])
    assert float(Max.of(values, jnp.array([True, True, False])).compute()) == 5.0
    assert float(Max.of(values).merge(Max.of(jnp.array([11.0]))).compute()) == 11.0


def test_nothing_seen():
    assert np.isnan(Mean.empty().compute())
    assert float(Max.empty().compute()) == -np.inf
    assert float(Max.of(jnp.zeros((0,))).compute()) == -np.inf


@settings(deadline=None, max_examples=25)
@given(numbers, numbers, numbers)
def test_monoid_laws(a, b, c):
    for kind in (Mean, Max):
        x, y, z = (kind.of(jnp.array(v, jnp.float32)) for v in (a, b, c))
        whole = kind.of(jnp.array(a + b + c, jnp.float32))
        for other in (x.merge(y).merge(z), x.merge(y.merge(z)), kind.empty().merge(whole)):
            assert [float(v) for v in other] == [float(v) for v in whole]
        assert [float(v) for v in x.merge(y)] == [float(v) for v in y.merge(x)]


def test_scan_over_microbatches_equals_one_pass():
    values = jnp.arange(12.0).reshape(3, 4)

    @jax.jit
    def scanned(rows):
        def body(state, row):
            return merge(state, {"m": Mean.of(row), "x": Max.of(row)}), None

        return jax.lax.scan(body, {"m": Mean.empty(), "x": Max.empty()}, rows)[0]

    got = compute(scanned(values))
    assert {k: float(v) for k, v in got.items()} == {"m": 5.5, "x": 11.0}


def test_merge_keeps_names_of_one_side_and_refuses_two_kinds():
    merged = merge({"a": Mean.of(jnp.ones(2))}, {"b": Max.of(jnp.ones(1))})
    assert sorted(merged) == ["a", "b"]
    with pytest.raises(ValueError, match="metric a is both Mean and Max"):
        merge({"a": Mean.empty()}, {"a": Max.empty()})
