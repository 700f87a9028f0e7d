"""Log-probabilities in vocabulary chunks against the whole log-softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.llama import LlamaConfig, build_model
from rl_jax.arrays import Array
from rl_jax.precision import kept_in, taking_any
from rl_jax.trainer import log_softmax as log_softmax_module
from rl_jax.trainer.log_softmax import Scored, chunk_rows, read_by_head
from rl_jax.trainer.scores import audit, chunked_scores, token_logprobs, token_scores
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
    got = chunked_scores(MODEL, TABLE, HIDDEN, TOKENS, HEAT, chunk).logprobs
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle(HIDDEN, TOKENS, HEAT), atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_gradients_of_chunks(chunk: int) -> None:
    weights = np.random.default_rng(1).normal(size=TOKENS.shape).astype(np.float32)

    def value(hidden: Array) -> Array:
        return jnp.sum(weights * chunked_scores(MODEL, TABLE, hidden, TOKENS, HEAT, chunk).logprobs)

    whole = np.exp(log_softmax(np.asarray(HIDDEN, np.float64) / HEAT[..., None]))
    want = (weights / HEAT)[..., None] * (np.eye(VOCAB)[TOKENS] - whole)
    np.testing.assert_allclose(jax.grad(value)(HIDDEN), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 8, 24])
def test_blocks_of_tokens_change_no_score(at_once: int, monkeypatch) -> None:
    """Blocks of 1, 1 and 3 of a row's 9 tokens, 4 rows of the vocabulary at a time."""

    def run() -> tuple[Array, ...]:
        def value(hidden: Array) -> tuple[Array, Scored]:
            got = chunked_scores(MODEL, TABLE, hidden, TOKENS, HEAT, 4, entropy=True)
            return jnp.sum(jnp.cos(jnp.arange(18.0)).reshape(2, 9) * got.logprobs), got

        (_, scored), gradient = jax.value_and_grad(value, has_aux=True)(HIDDEN)
        return *scored, gradient

    whole = run()
    monkeypatch.setattr(log_softmax_module, "LOGITS", at_once)
    for one, other in zip(run(), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [3, 12])
def test_extreme_logits_stay_finite(chunk: int) -> None:
    hidden = jnp.asarray(np.float32([[[1e4] * 6 + [-1e4] * 6]]))
    targets, heat = np.array([[11]], np.int32), np.ones((1, 1), np.float32)

    def value(hidden: Array) -> Array:
        return chunked_scores(MODEL, TABLE, hidden, targets, heat, chunk).logprobs.sum()

    got, gradient = jax.value_and_grad(value)(hidden)
    assert float(got) == pytest.approx(-2e4 - np.log(6), rel=1e-6)
    np.testing.assert_allclose(gradient[0, 0], [-1 / 6] * 6 + [0] * 5 + [1], rtol=1e-3)


@pytest.mark.parametrize("limit", [2, 5, 7, 12])
def test_a_last_chunk_that_overlaps_changes_nothing(limit: int) -> None:
    """13 rows: 7, 3, 2 and 2 chunks."""
    odd, draws = bigram(13), np.random.default_rng(5)
    hidden = jnp.asarray(draws.normal(size=(*TOKENS.shape, 13)) * 3, jnp.float32)
    targets = draws.integers(13, size=TOKENS.shape).astype(np.int32)
    targets[0] = [4, 5, 6, 7, 8, 9, 10, 11, 12]
    whole = log_softmax(np.asarray(hidden, np.float64) / HEAT[..., None])

    def value(hidden: Array) -> tuple[Array, Scored]:
        got = chunked_scores(odd, {}, hidden, targets, HEAT, limit, entropy=True)
        return jnp.sum(got.logprobs) + jnp.sum(got.entropy), got

    slope, got = jax.grad(value, has_aux=True)(hidden)
    wanted = np.take_along_axis(whole, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(got.logprobs, wanted, atol=5e-6)
    nats = -np.sum(np.exp(whole) * whole, -1, keepdims=True)
    np.testing.assert_allclose(got.entropy, nats[..., 0], atol=5e-6)
    own = (np.eye(13)[targets] - np.exp(whole)) - np.exp(whole) * (whole + nats)
    np.testing.assert_allclose(slope, own / HEAT[..., None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "at_most", "parts", "rows"),
    [
        (4096 * 3, 4096, 1, 4096),
        (12, 5, 1, 4),
        (13, 5, 1, 5),
        (3, 8, 1, 3),
        (8191, 4096, 1, 4096),
        # Qwen3: 2^7 x 1187.
        (151_936, 4096, 1, 2374),
        (151_936, 2374, 2, 1187),
        (151_936, 2374, 4, 585),
        (151_936, 2374, 8, 293),
    ],
)
def test_rows_of_a_chunk(vocabulary: int, at_most: int, parts: int, rows: int) -> None:
    assert chunk_rows(vocabulary, at_most, parts) == rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_reads_one_leaf_in_either_dtype(dtype: str, tied: bool) -> None:
    shape = LlamaConfig(
        vocab_size=16, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_width=8, tied=tied
    )
    model = taking_any(build_model(shape))
    params = jax.eval_shape(lambda: kept_in(model.init(jax.random.key(0)), dtype))
    read = read_by_head(model, params, jnp.zeros((1, 64, 8)))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert [names[i] for i in read] == ["['embedding']" if tied else "['head']"]


def test_a_chunk_has_a_row() -> None:
    with pytest.raises(ValueError, match="vocab_chunk 0: needs at least 1"):
        chunked_scores(MODEL, TABLE, HIDDEN, TOKENS, HEAT, 0)


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


def entropy_of(hidden: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """float64: -sum p log p over the whole vocabulary."""
    whole = log_softmax(np.asarray(hidden, np.float64) / heat[..., None])
    return -(np.exp(whole) * whole).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 4, 12])
def test_entropy_is_that_of_the_whole_softmax(chunk: int) -> None:
    got = chunked_scores(MODEL, TABLE, HIDDEN, TOKENS, HEAT, chunk, entropy=True)
    assert got.entropy is not None and got.entropy.dtype == jnp.float32
    np.testing.assert_allclose(got.entropy, entropy_of(HIDDEN, HEAT), atol=2e-6)
    without = chunked_scores(MODEL, TABLE, HIDDEN, TOKENS, HEAT, chunk)
    assert without.entropy is None
    assert (got.logprobs == without.logprobs).all()


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_gradient_of_entropy(chunk: int) -> None:
    weights = np.random.default_rng(1).normal(size=TOKENS.shape).astype(np.float32)

    def value(hidden: Array) -> Array:
        scored = chunked_scores(MODEL, TABLE, hidden, TOKENS, HEAT, chunk, entropy=True)
        return jnp.sum(weights * scored.entropy)

    whole = log_softmax(np.asarray(HIDDEN, np.float64) / HEAT[..., None])
    # dH/dl_v = -p_v (log p_v + H), and logits are hidden / temperature.
    slope = -np.exp(whole) * (whole + entropy_of(HIDDEN, HEAT)[..., None])
    want = (weights / HEAT)[..., None] * slope
    # Nats of a few, merged up to twelve times: sums of a few float32 steps of 2e-7.
    np.testing.assert_allclose(jax.grad(value)(HIDDEN), want, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_entropy_of_extreme_logits(chunk: int) -> None:
    """A sure choice has none, a choice between twelve equals log 12, between two far chunks log 2;
    all gradients are finite. Logits of this size are known in steps of 2e-3."""
    sure = [1e4] + [-1e4] * 11
    two = [1e4] + [-1e4] * 10 + [1e4]
    hidden = jnp.asarray(np.float32([[sure, [-3e4] * 12, two]]))
    targets, heat = np.zeros((1, 3), np.int32), np.ones((1, 3), np.float32)

    def value(hidden: Array) -> tuple[Array, Array]:
        scored = chunked_scores(MODEL, TABLE, hidden, targets, heat, chunk, entropy=True)
        return scored.entropy.sum(), scored.entropy

    (_, got), gradient = jax.value_and_grad(value, has_aux=True)(hidden)
    np.testing.assert_allclose(got[0], [0.0, np.log(12), np.log(2)], atol=2e-3)
    assert np.isfinite(gradient).all()


def test_entropy_stands_at_the_token_it_is_of() -> None:
    got = token_scores(
        MODEL, TABLE, TOKENS, POSITIONS, SEGMENTS, HEAT, vocab_chunk=4, entropy=True
    ).entropy
    want = entropy_of(np.asarray(TABLE["table"])[TOKENS[:, :-1]], HEAT[:, 1:])
    np.testing.assert_allclose(got[:, 1:], want, atol=2e-6)
