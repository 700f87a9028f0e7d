"""Log-probabilities in vocabulary chunks against the whole log-softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import Array
from rl_jax.trainer.scores import audit, chunked_logprobs, token_logprobs
from tests.fakes.bigram import bigram, log_softmax, logprobs, table

VOCAB = 12
MODEL = bigram(VOCAB)
TABLE = table(VOCAB, seed=3)
LOGITS = 4 * np.asarray(TABLE["table"])
DRAWS = np.random.default_rng(0)
TOKENS = DRAWS.integers(VOCAB, size=(2, 9)).astype(np.int32)
HEAT = DRAWS.uniform(0.3, 3.0, size=(2, 9)).astype(np.float32)
SEGMENTS = np.array([[0] * 9, [1] * 4 + [2] * 3 + [-1] * 2], np.int32)
POSITIONS = np.array([[*range(9)], [*range(4), *range(3), 0, 0]], np.int32)
HIDDEN = jnp.asarray(LOGITS[TOKENS])


def oracle(hidden: np.ndarray, targets: np.ndarray, heat: np.ndarray) -> np.ndarray:
    whole = log_softmax(np.asarray(hidden, np.float64) / heat[..., None])
    return np.take_along_axis(whole, targets[..., None], -1)[..., 0]


@pytest.mark.parametrize("chunk", [1, 3, 4, 6, 12])
def test_chunks_give_the_whole_log_softmax(chunk: int) -> None:
    got = chunked_logprobs(MODEL, TABLE, HIDDEN, TOKENS, HEAT, chunk)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle(HIDDEN, TOKENS, HEAT), atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_gradients_of_chunks(chunk: int) -> None:
    weights = np.random.default_rng(1).normal(size=TOKENS.shape).astype(np.float32)

    def value(hidden: Array) -> Array:
        return jnp.sum(weights * chunked_logprobs(MODEL, TABLE, hidden, TOKENS, HEAT, chunk))

    whole = np.exp(log_softmax(np.asarray(HIDDEN, np.float64) / HEAT[..., None]))
    want = (weights / HEAT)[..., None] * (np.eye(VOCAB)[TOKENS] - whole)
    np.testing.assert_allclose(jax.grad(value)(HIDDEN), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [3, 12])
def test_extreme_logits_stay_finite(chunk: int) -> None:
    hidden = jnp.asarray(np.float32([[[1e4] * 6 + [-1e4] * 6]]))
    targets, heat = np.array([[11]], np.int32), np.ones((1, 1), np.float32)

    def value(hidden: Array) -> Array:
        return chunked_logprobs(MODEL, TABLE, hidden, targets, heat, chunk).sum()

    got, gradient = jax.value_and_grad(value)(hidden)
    assert float(got) == pytest.approx(-2e4 - np.log(6), rel=1e-6)
    np.testing.assert_allclose(gradient[0, 0], [-1 / 6] * 6 + [0] * 5 + [1], rtol=1e-3)


def test_a_chunk_must_divide_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_chunk 5 does not divide 12"):
        chunked_logprobs(MODEL, TABLE, HIDDEN, TOKENS, HEAT, 5)


def test_scores_stand_at_the_token_they_speak_of() -> None:
    got = token_logprobs(MODEL, TABLE, TOKENS, POSITIONS, SEGMENTS, HEAT, vocab_chunk=4)
    for row, first, end in ((0, 0, 9), (1, 0, 4), (1, 4, 7)):
        for t in range(first + 1, end):
            logits = np.asarray(TABLE["table"])[TOKENS[row, t - 1]] / HEAT[row, t]
            want = log_softmax(logits)[TOKENS[row, t]]
            assert float(got[row, t]) == pytest.approx(want, abs=2e-6)


def test_a_segment_scores_as_it_does_alone() -> None:
    got = token_logprobs(MODEL, TABLE, TOKENS, POSITIONS, SEGMENTS, HEAT, vocab_chunk=4)
    alone = token_logprobs(
        MODEL,
        TABLE,
        TOKENS[1:, 4:7],
        POSITIONS[1:, 4:7],
        SEGMENTS[1:, 4:7],
        HEAT[1:, 4:7],
        vocab_chunk=4,
    )
    # Its first token has no score: there, both hold what a mask must hide.
    assert (got[1, 5:7] == alone[0, 1:]).all()


def test_audit_finds_the_largest_gap_of_fresh_tokens_only() -> None:
    true = np.stack([logprobs(np.asarray(TABLE["table"]), row) for row in TOKENS])
    behavior = true.astype(np.float32)
    behavior[0, 2] += 0.25
    behavior[0, 5] -= 0.5
    behavior[0, 7] += 9.0
    behavior[0, 8] = np.nan
    fresh = np.zeros(TOKENS.shape, bool)
    fresh[0, 1:7] = True
    ones = np.ones(TOKENS.shape, np.float32)
    worst, count = audit(
        MODEL, TABLE, TOKENS, POSITIONS, SEGMENTS, ones, behavior, fresh, vocab_chunk=4
    )
    assert float(worst) == pytest.approx(0.5, abs=1e-5)
    assert int(count) == 6
    nothing = audit(
        MODEL, TABLE, TOKENS, POSITIONS, SEGMENTS, ones, behavior, ~fresh & False, vocab_chunk=4
    )
    assert [float(n) for n in nothing] == [0.0, 0.0]
