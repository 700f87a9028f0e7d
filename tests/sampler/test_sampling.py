"""Inversion against float64, at its edges, and the log-probabilities that are recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.sampler.sampling import Sampled, sample

LARGEST = np.float32(1 - 2**-23)
"""The largest uniform that jax draws."""


def logits_of(probabilities: list[float] | np.ndarray) -> np.ndarray:
    """Zero probability is a logit so low that its exponential vanishes; all stay finite."""
    p = np.asarray(probabilities, np.float64)
    return np.where(p > 0, np.log(np.maximum(p, 1e-300)), -1000.0).astype(np.float32)


@jax.jit
def drawn(logits: jax.Array, temperature: jax.Array, uniforms: jax.Array) -> Sampled:
    return sample(logits, temperature, uniforms)


def draw(logits: np.ndarray, uniforms: list[float], temperature: float = 1.0) -> Sampled:
    """One row of logits at many uniforms."""
    u = np.asarray(uniforms, np.float32)
    rows = np.broadcast_to(logits, (len(u), len(logits)))
    return jax.device_get(drawn(rows, np.full(len(u), temperature, np.float32), u))


def test_a_token_has_the_interval_of_its_probability() -> None:
    """0.25, 0.5, 0.125, 0.125 in vocabulary order: exact in float32, so are the borders."""
    uniforms = [0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.8749, 0.875, LARGEST]
    got = draw(logits_of([0.25, 0.5, 0.125, 0.125]), uniforms)
    assert got.tokens.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]


def test_inversion_matches_float64() -> None:
    random = np.random.default_rng(1)
    for temperature in (1.0, 0.6, 2.5):
        logits = random.normal(0, 3, 100).astype(np.float32)
        p = np.exp(np.float64(logits) / temperature)
        p /= p.sum()
        edges = np.cumsum(p)
        wide = np.flatnonzero(p > 1e-5)
        middles = (edges - p / 2)[wide]
        got = draw(logits, middles.tolist(), temperature)
        np.testing.assert_array_equal(got.tokens, wide)
        np.testing.assert_allclose(got.logprobs, np.log(p[wide]), atol=2e-6, rtol=1e-6)


def test_tokens_without_probability_are_never_drawn() -> None:
    """Leading, inner and trailing zeros, at the ends of the uniform's range."""
    got = draw(logits_of([0, 0, 0.5, 0, 0.5, 0, 0]), [0.0, 2**-23, 0.4999, 0.5, LARGEST])
    assert got.tokens.tolist() == [2, 2, 2, 4, 4]


def test_rounding_of_the_prefix_sum_draws_no_token_without_probability() -> None:
    """The sum is a tree, so its entries move at zero probabilities too: uniforms in those gaps."""
    random = np.random.default_rng(0)
    p = random.exponential(size=(50, 512))
    p[:, ::3] = 0
    logits = np.stack([logits_of(row / row.sum()) for row in p])
    scores = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    sums = np.asarray(jax.jit(lambda s: jnp.cumsum(jnp.exp(s), axis=-1))(scores))
    rows, columns = np.nonzero((np.diff(sums, axis=-1) > 0) & (p[:, 1:] == 0))
    assert len(rows) > 20, "the rounding that this test is about is there"
    for uniforms in (sums[rows, columns] / sums[rows, -1], np.full(len(rows), LARGEST)):
        got = drawn(logits[rows], np.ones(len(rows), np.float32), uniforms.astype(np.float32))
        assert (p[rows, np.asarray(got.tokens)] > 0).all()


def test_greedy_takes_the_first_maximum_whatever_the_uniform() -> None:
    logits = np.array([0.0, 2.0, 1.0, 2.0], np.float32)
    got = draw(logits, [0.0, 0.5, LARGEST], temperature=0.0)
    assert got.tokens.tolist() == [1, 1, 1]
    expected = 2.0 - np.log(np.exp(np.float64(logits)).sum())
    np.testing.assert_allclose(got.logprobs, expected, rtol=1e-6)
    np.testing.assert_array_equal(got.logprobs, got.raw_logprobs)


def test_log_probabilities_of_both_distributions() -> None:
    """Logits 0, 1, 2 at temperature 2: exp(0, 0.5, 1) against exp(0, 1, 2), token 2 drawn."""
    got = draw(np.array([0.0, 1.0, 2.0], np.float32), [0.9], temperature=2.0)
    assert got.tokens.tolist() == [2]
    heated, raw = np.exp([0.0, 0.5, 1.0]), np.exp([0.0, 1.0, 2.0])
    np.testing.assert_allclose(got.logprobs[0], 1.0 - np.log(heated.sum()), rtol=1e-6)
    np.testing.assert_allclose(got.raw_logprobs[0], 2.0 - np.log(raw.sum()), rtol=1e-6)


def test_rows_have_their_own_temperature() -> None:
    logits = np.array([[0.0, 1.0, 2.0]] * 3, np.float32)
    heat, uniforms = np.array([0.0, 1.0, 0.1], np.float32), np.full(3, 0.05, np.float32)
    got = drawn(logits, heat, uniforms)
    assert np.asarray(got.tokens).tolist() == [2, 0, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_logit_that_is_not_finite_marks_its_row_alone(bad: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 4] = bad
    got = drawn(logits, np.ones(3, np.float32), np.full(3, 0.3, np.float32))
    assert np.asarray(got.finite).tolist() == [True, False, True]
    assert np.asarray(got.tokens)[[0, 2]].tolist() == [1, 1]
    assert 0 <= int(got.tokens[1]) < 5


def test_frequencies_are_the_probabilities() -> None:
    """10,000 draws: within 4 standard deviations of n p, for every token."""
    p = np.array([0.02, 0.4, 0.08, 0.3, 0.2])
    n = 10_000
    uniforms = jax.random.uniform(jax.random.key(3), (n,))
    got = draw(logits_of(p), np.asarray(uniforms).tolist())
    counts = np.bincount(got.tokens, minlength=5)
    assert (np.abs(counts - n * p) < 4 * np.sqrt(n * p * (1 - p))).all()
