"""Policies of the Llama kind: float64 values and slopes, packing, prefill, decode, execution."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.execution import Execution
from models.llama import LlamaConfig, RopeScaling, build_model
from rl_jax.arrays import round_up
from tests.fakes.cache import DENSE, dense_pool
from tests.fakes.compiling import QUICK
from tests.models import llama_reference
from tests.models.slopes import assert_slopes

VOCAB, CONTEXT, ROWS = 64, 256, 4
"""CONTEXT and ROWS of a pool: one size, so that all tests share a width's program."""
SIZES = {"vocab_size": VOCAB, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
ONE = {"layers": 1}
"""Variants differ inside a layer, and a second takes as long again to compile."""
VARIANTS = {
    "llama": LlamaConfig(**SIZES, ffn_width=48, rope_theta=100.0, tied=False),
    "linear": LlamaConfig(
        **SIZES | {"kv_heads": 4, "head_dim": 8} | ONE, ffn_width=40,
        rope_scaling=RopeScaling("linear", 2.0),
    ),
    "qwen2": LlamaConfig(
        **SIZES | {"kv_heads": 1} | ONE, ffn_width=48, qkv_bias=True, rms_eps=1e-6
    ),
    "qwen3": LlamaConfig(
        **SIZES | {"heads": 6, "kv_heads": 3} | ONE, ffn_width=48, qk_norm=True
    ),
}  # fmt: skip
CONFIG = VARIANTS["llama"]
MODEL = build_model(CONFIG)


@cache
def params_of(name: str = "llama") -> dict:
    """Random everywhere, biases and scales too."""
    shapes = jax.eval_shape(build_model(VARIANTS[name]).init, jax.random.key(0))
    random = np.random.default_rng(0)

    def one(path, leaf):
        noise = random.normal(size=leaf.shape)
        vector = path[-1].key == "scale"
        return jnp.asarray(1 + 0.2 * noise if vector else 0.2 * noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(one, shapes)


def sequence(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def pack(rows: list, length: int):
    """Rows of sequences -> (tokens, positions, segments)[R, length] and (row, start, sequence)."""
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments, places = np.full(shape, -1, np.int32), []
    for i, sequences in enumerate(rows):
        start = 0
        for number, own in enumerate(sequences):
            span = slice(start, start + len(own))
            tokens[i, span], segments[i, span] = own, number
            positions[i, span] = np.arange(len(own))
            places.append((i, start, own))
            start += round_up(len(own), 64)
    return (tokens, positions, segments), places


forward = jax.jit(MODEL.forward)


def extended(params, *inputs):
    return MODEL.extend(params, *inputs, DENSE)


exactly, quickly = jax.jit(extended), jax.jit(extended, compiler_options=QUICK)


def extend(tokens, *inputs):
    """No test compares bits of pieces of 5."""
    run = quickly if tokens.shape[1] == 5 else exactly
    return run(params_of(), tokens, *inputs)


def alone(tokens: np.ndarray) -> np.ndarray:
    batch, _ = pack([[], [tokens], []], CONTEXT)
    return np.asarray(forward(params_of(), *batch))[1, : len(tokens)]


def feed(tokens, cuts, pool, row=0):
    """Runs `tokens` through `extend` in the given pieces as request `row`, the others idle."""
    hidden, start = [], 0
    for size in cuts:
        n = min(size, len(tokens) - start)
        piece = np.full((ROWS, size), 5, np.int32)
        piece[row, :n] = tokens[start : start + n]
        n_valid, positions = np.zeros(ROWS, np.int32), np.full(ROWS, 7, np.int32)
        n_valid[row], positions[row] = n, start
        out, pool = extend(piece, n_valid, positions, np.arange(ROWS), pool)
        hidden.append(np.asarray(out)[row, :n])
        start += n
    assert start == len(tokens)
    return np.concatenate(hidden), pool


# --- the mathematics -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_slopes_are_those_of_numpy_in_float64(name: str) -> None:
    """Two sequences in one row; the slope along a random direction of every leaf by finite
    differences of the reference."""
    config, (one, two) = VARIANTS[name], (sequence(70), sequence(9, seed=2))
    batch, _ = pack([[one, two]], 192)
    tokens, segments = batch[0], batch[2]

    def loss(params):
        model = build_model(config)
        hidden = model.forward(params, *batch)
        table = params["embedding" if config.tied else "head"]
        scores = jax.nn.log_softmax(hidden @ table.T)
        chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        valid = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
        return -jnp.sum(jnp.where(valid, chosen, 0.0)), hidden @ table.T

    exact = jax.tree.map(np.float64, params_of(name))
    with jax.enable_x64(True):
        run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
        (_, got), grads = jax.tree.map(np.asarray, run(exact))
    np.testing.assert_allclose(got[0, :70], llama_reference.logits(config, exact, one), rtol=1e-9)
    np.testing.assert_allclose(
        got[0, 128:137], llama_reference.logits(config, exact, two), rtol=1e-9, atol=1e-12
    )

    def value(tree):
        return sum(llama_reference.loss(config, tree, own) for own in (one, two))

    assert_slopes(value, exact, grads, rtol=1e-4, atol=1e-10)


def test_float32_logits_and_slices_of_the_head() -> None:
    tokens = sequence(64)
    head = jax.jit(MODEL.head, static_argnums=3, compiler_options=QUICK)
    hidden = alone(tokens)
    parts = [head(params_of(), hidden, jnp.asarray(at), 16) for at in range(0, VOCAB, 16)]
    want = llama_reference.logits(CONFIG, jax.tree.map(np.float64, params_of()), tokens)
    np.testing.assert_allclose(np.concatenate(parts, -1), want, atol=2e-5)


# --- packing, prefill, decode --------------------------------------------------------------------


def test_a_packed_row_equals_each_trajectory_alone_bit_for_bit() -> None:
    sequences = [sequence(n, seed=n) for n in (1, 65, 17, 192, 130, 64)]
    batch, places = pack([sequences[:3], [sequences[3]], sequences[4:]], CONTEXT)
    hidden = np.asarray(forward(params_of(), *batch))
    assert np.all(np.isfinite(hidden))
    for row, start, tokens in places:
        assert np.array_equal(hidden[row, start : start + len(tokens)], alone(tokens))


@pytest.mark.parametrize("cuts", [(64, 64, 64), (128, 64)])
def test_prefill_at_multiples_of_64_equals_training_bit_for_bit(cuts) -> None:
    tokens = sequence(150)
    hidden, _ = feed(tokens, cuts, dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    assert np.array_equal(hidden, alone(tokens))


@pytest.mark.parametrize("cuts", [(64,) + (1,) * 86, (64, 5, 1, 64, 1, 5, 5, 5)])
def test_decode_and_odd_cuts_follow_training(cuts) -> None:
    tokens = sequence(150)
    hidden, _ = feed(tokens, cuts, dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    np.testing.assert_allclose(hidden, alone(tokens), atol=1e-5)


def test_a_request_is_the_same_alone_and_among_others() -> None:
    prompt = sequence(70)
    pool = dense_pool(MODEL.cache_spec, ROWS, CONTEXT)
    _, quiet = feed(prompt, (128,), pool, row=1)
    loaded = quiet
    for row in (0, 2, 3):
        _, loaded = feed(sequence(40 + row, seed=row), (128,), loaded, row=row)
    tokens, pages = np.array([[9], [11], [13], [17]], np.int32), np.arange(ROWS)
    positions = np.array([40, 70, 42, 43])
    one, _ = extend(tokens, np.array([0, 1, 0, 0]), positions, pages, quiet)
    many, _ = extend(tokens, np.ones(4, int), positions, pages, loaded)
    assert np.array_equal(one[1], many[1])


def test_positions_count_within_the_trajectory() -> None:
    """Moved positions change the result no more than rounding: attention sees differences only."""
    (tokens, positions, segments), _ = pack([[sequence(60)], [], []], CONTEXT)
    near = np.asarray(forward(params_of(), tokens, positions, segments))[0, :60]
    far = np.asarray(forward(params_of(), tokens, positions + 50, segments))[0, :60]
    np.testing.assert_allclose(near, far, atol=1e-4)
    stretched = np.asarray(forward(params_of(), tokens, positions * 2, segments))[0, :60]
    assert np.abs(near - stretched).max() > 1e-2


# --- execution -----------------------------------------------------------------------------------


def gradient(execution: Execution):
    model = build_model(CONFIG, execution)
    batch, _ = pack([[sequence(70)], [sequence(30, seed=1), sequence(20, seed=2)]], 128)

    def loss(params):
        hidden = model.forward(params, *batch)
        logits = model.head(params, hidden, 0, VOCAB)
        scores = jax.nn.log_softmax(logits)
        weights = (batch[2] >= 0) * np.sin(np.arange(128))
        return jnp.sum(scores[..., 3] * weights), (hidden, logits)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
    return run(params_of())


@pytest.fixture(scope="module")
def plain():
    return gradient(Execution())


@pytest.mark.parametrize("execution", [Execution(remat="block"), Execution(True, "dots")], ids=str)
def test_scan_and_remat_change_nothing(execution: Execution, plain) -> None:
    (value, (hidden, _)), grads = gradient(execution)
    (want, (plain_hidden, _)), plain_grads = plain
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(hidden, plain_hidden, atol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


def test_bfloat16_is_near_float32_with_logits_in_float32(plain) -> None:
    (_, (hidden, logits)), grads = gradient(Execution(compute="bfloat16"))
    (_, (_, want)), plain_grads = plain
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert 1e-5 < np.abs(logits - want).mean() / np.abs(want).mean() < 0.03
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


def test_decode_in_bfloat16_follows_training() -> None:
    model = build_model(CONFIG, Execution(compute="bfloat16"))
    tokens = sequence(64)[None]
    forward, extend = (
        jax.jit(model.forward, compiler_options=QUICK),
        jax.jit(model.extend, static_argnums=6, compiler_options=QUICK),
    )
    want = forward(params_of(), tokens, np.arange(64)[None], np.zeros((1, 64), int))
    pool = dense_pool(model.cache_spec, 1, 64)
    got, _ = extend(params_of(), tokens, np.array([64]), np.array([0]), np.arange(1), pool, DENSE)
    error = np.linalg.norm(np.float32(got) - np.float32(want)) / np.linalg.norm(np.float32(want))
    assert error < 0.01


# --- what it says of itself ----------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_axes_name_every_dimension(name: str) -> None:
    config, model = VARIANTS[name], build_model(VARIANTS[name])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    sizes = {"vocab": VOCAB, "embed": 32, "heads": config.heads, "mlp": config.ffn_width}
    sizes["kv_heads"] = config.kv_heads
    named = jax.tree.map(lambda leaf, names: (leaf.shape, names), shapes, model.axes())
    for shape, names in jax.tree.leaves(named, is_leaf=lambda x: isinstance(x, tuple)):
        for size, name_of in zip(shape, names, strict=True):
            assert name_of is None or sizes[name_of] == size
    kept = ((2 * config.head_dim, config.kv_heads),) * config.layers
    assert model.cache_spec.tokens == kept and not model.cache_spec.states


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_heads": 3}, "kv_heads: 3 must divide heads = 4"),
        ({"head_dim": 7}, "head_dim: 7 must be even"),
        ({"layers": 0}, "layers: 0 must be at least 1"),
    ],
)
def test_a_wrong_configuration_is_named(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LlamaConfig(**SIZES | {"ffn_width": 48} | change)
