"""The hybrid policy: packing and prefill bit for bit, decode within 1e-5, gradients, meshes."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.kimi_linear import KimiLinearConfig, build_model
from models.layers.context import rows_of
from models.layers.mla import LatentAttention
from rl_jax.arrays import round_up
from rl_jax.kernels.mla import api as mla
from tests.fakes.cache import DENSE, dense_pool
from tests.fakes.compiling import QUICK
from tests.models import textbook
from tests.models.slopes import assert_slopes

CONFIG = KimiLinearConfig(
    vocab_size=64, width=64, heads=4, head_dim=16, kv_latent=16, kv_shared_key=8, ffn_width=64,
    gate_rank=8, layers=("kda", "mla"),
)  # fmt: skip
MODEL = build_model(CONFIG)
quick = partial(jax.jit, compiler_options=QUICK)
CONTEXT, ROWS = 256, 4
"""Of a pool; one number of rows, so that all tests share a width's program."""
forward = jax.jit(MODEL.forward)


def random_weights(model):
    """Random everywhere, most of a state surviving a token; compiling `init` takes longer."""
    rng = np.random.default_rng(3)

    def one(path, leaf):
        center, spread = {"scale": (1, 0.1), "decay_bias": (-4, 0.5)}.get(path[-1].key, (0, 0.12))
        return rng.normal(center, spread, leaf.shape).astype(np.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(one, shapes)


@cache
def weights():
    return jax.device_put(random_weights(MODEL))


def extended(params, *inputs):
    return MODEL.extend(params, *inputs, DENSE)


exactly, quickly = jax.jit(extended), quick(extended)
BOUNDED = (5, 16)
"""Widths of which no test compares bits."""


def extend(tokens, *inputs):
    run = quickly if tokens.shape[1] in BOUNDED else exactly
    return run(weights(), tokens, *inputs)


def logprobs(hidden, params=None):
    """float64[L, vocabulary] in numpy."""
    params = weights() if params is None else params
    logits = np.float64(hidden) @ np.float64(params["embedding"]).T
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def sequence(length, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).astype(np.int32)


def pack(rows, length):
    """Rows of sequences -> (tokens, positions, segments)[R, length] and (row, start, sequence)."""
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    segments, places = np.full(shape, -1, np.int32), []
    for i, sequences in enumerate(rows):
        start = 0
        for number, tokens_of in enumerate(sequences):
            span = slice(start, start + len(tokens_of))
            tokens[i, span], segments[i, span] = tokens_of, number
            positions[i, span] = np.arange(len(tokens_of))
            places.append((i, start, tokens_of))
            start += round_up(len(tokens_of), 64)
    return (tokens, positions, segments), places


def alone(tokens):
    batch, _ = pack([[], [tokens], []], CONTEXT)
    return np.asarray(forward(weights(), *batch))[1, : len(tokens)]


def feed(tokens, cuts, pool, row=0):
    """Runs `tokens` through `extend` in the given pieces as request `row`, the others idle; a piece
    is its width, or (width, how many of it count)."""
    hidden, start = [], 0
    for cut in cuts:
        size, n = cut if isinstance(cut, tuple) else (cut, min(cut, len(tokens) - start))
        piece = np.full((ROWS, size), 5, np.int32)
        piece[row, :n] = tokens[start : start + n]
        n_valid, positions = np.zeros(ROWS, np.int32), np.full(ROWS, 7, np.int32)
        n_valid[row], positions[row] = n, start
        out, pool = extend(piece, n_valid, positions, np.arange(ROWS), pool)
        hidden.append(np.asarray(out)[row, :n])
        start += n
    assert start == len(tokens)
    return np.concatenate(hidden), pool


def test_a_packed_row_equals_each_trajectory_alone_bit_for_bit():
    sequences = [sequence(n, seed=n) for n in (1, 65, 17, 256, 130, 64)]
    batch, places = pack([sequences[:3], [sequences[3]], sequences[4:]], CONTEXT)
    hidden = np.asarray(forward(weights(), *batch))
    assert np.all(np.isfinite(hidden))
    for row, start, tokens in places:
        assert np.array_equal(hidden[row, start : start + len(tokens)], alone(tokens))


@pytest.mark.parametrize("token", [0, 63, 64, 100])
def test_no_position_sees_a_later_token(token):
    tokens = sequence(150)
    changed = tokens.copy()
    changed[token:] = (changed[token:] + 1) % CONFIG.vocab_size
    one, two = alone(tokens), alone(changed)
    assert np.array_equal(one[:token], two[:token])
    assert np.all(np.any(one[token:] != two[token:], -1))


@pytest.mark.parametrize("cuts", [(64, 64, 64), (128, 64), (64, 128)])
def test_prefill_at_multiples_of_64_equals_training_bit_for_bit(cuts):
    tokens = sequence(150)
    hidden, _ = feed(tokens, cuts, dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    assert np.array_equal(hidden, alone(tokens))


@pytest.mark.parametrize(
    "cuts", [(64,) + (1,) * 86, (16,) * 10, (64, 5, 1, (64, 40), 1, 16, 16, 16)]
)
def test_decode_and_odd_cuts_follow_training(cuts):
    tokens = sequence(150)
    hidden, _ = feed(tokens, cuts, dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    np.testing.assert_allclose(logprobs(hidden), logprobs(alone(tokens)), atol=1e-5)


def test_a_request_is_the_same_alone_and_among_others():
    """Decode from row 1 of 4: the others idle, then busy with other requests; every bit equal."""
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
    turned, _ = extend(tokens[::-1], np.ones(4, int), positions[::-1], pages[::-1], loaded)
    assert np.array_equal(turned[::-1], many)


def test_idle_rows_keep_what_they_had_and_garbage_never_spreads():
    pool = dense_pool(MODEL.cache_spec, ROWS, CONTEXT)
    _, pool = feed(sequence(70), (128,), pool, row=0)
    before = jax.tree.map(np.asarray, pool)
    other, after = feed(sequence(66, seed=1), (64, 1, 1), pool, row=1)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(old[0], new[0], equal_nan=True)
    assert np.all(np.isfinite(other))


def test_a_row_taken_over_starts_from_zero():
    """The pool still holds another request's state; a request at position 0 does not read it."""
    _, used = feed(sequence(200), (128, 128), dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    tokens = sequence(20, seed=4)
    fresh, _ = feed(tokens, (64,), dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    again, _ = feed(tokens, (64,), used)
    assert np.array_equal(fresh, again)


def latent_attention(latent):
    return LatentAttention(
        width=32, heads=4, head_dim=16, latent=latent, shared_key=8, eps=CONFIG.rms_eps,
        out_gain=1.0, rngs=nnx.Rngs(0),
    )  # fmt: skip


SEGMENTS = np.where(np.arange(128) < 64, 0, np.where(np.arange(128) < 104, 1, -1))[None]


@pytest.mark.parametrize(
    ("latent", "kind"),
    [(24, "attend_heads"), (17, "attend_heads"), (16, "attend_rows"), (8, "attend_rows")],
)
def test_latent_attention_takes_the_form_of_fewer_products(monkeypatch, latent, kind):
    """Heads of 16 numbers: expanded below the latent's width."""
    asked = []

    def heard(name, run, *operands, **keywords):
        asked.append(name)
        return run(*operands, **keywords)

    for name in ("attend_heads", "attend_rows"):
        monkeypatch.setattr(mla, name, partial(heard, name, getattr(mla, name)))
    rows, x = rows_of(jnp.asarray(SEGMENTS)), jax.ShapeDtypeStruct((1, 128, 32), jnp.float32)
    jax.eval_shape(lambda x: latent_attention(latent).forward(x, rows), x)
    assert asked == [kind]


def test_the_expanded_form_has_the_values_and_slopes_of_the_formula():
    """Two sequences in one row, in float64; the whole model below has the absorbed form."""
    graph, state = nnx.split(nnx.eval_shape(lambda: latent_attention(24)))
    rng, config = np.random.default_rng(0), replace(CONFIG, kv_latent=24)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape), nnx.to_pure_dict(state))
    x, towards = rng.standard_normal((2, 128, 32)) * (SEGMENTS.T >= 0)

    def packed(params, x):
        out = nnx.merge(graph, params).forward(x[None], rows_of(jnp.asarray(SEGMENTS)))[0]
        return jnp.sum(out * towards), out

    def formula(params, x):
        parts = x[:64], x[64:104]
        return np.concatenate([textbook.latent_attention(x, params, config) for x in parts])

    with jax.enable_x64(True):
        run = quick(jax.value_and_grad(packed, (0, 1), has_aux=True))
        (_, out), slopes = jax.tree.map(np.asarray, run(params, x))
    np.testing.assert_allclose(out[:104], formula(params, x), atol=1e-12)

    def value(at):
        return np.sum(formula(*at) * towards[:104])

    assert_slopes(value, (params, x), slopes, rtol=1e-6, atol=1e-12)


def test_head_slices_make_the_whole():
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, CONFIG.width)), jnp.float32)
    want = np.asarray(hidden, np.float64) @ np.asarray(weights()["embedding"], np.float64).T
    sliced = quick(MODEL.head, static_argnums=3)
    starts = range(0, CONFIG.vocab_size, 16)
    parts = [sliced(weights(), hidden, jnp.asarray(start), 16) for start in starts]
    np.testing.assert_allclose(np.concatenate(parts, -1), want, atol=1e-5)


def loss(params, tokens, positions, segments):
    """Mean cross-entropy of the next token over valid positions."""
    hidden = MODEL.forward(params, tokens, positions, segments)
    scores = jax.nn.log_softmax(hidden @ params["embedding"].T)
    chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    valid = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return -jnp.sum(jnp.where(valid, chosen, 0.0)) / jnp.sum(valid)


gradient = quick(jax.value_and_grad(loss))


@cache
def exact():
    return jax.tree.map(np.float64, weights())


def test_values_and_gradients_are_those_of_the_formulas_in_float64():
    """Two sequences in one row; the slope along a random direction of every leaf by finite
    differences of numpy's model."""
    sequences = sequence(70), sequence(30, seed=2)
    batch, _ = pack([sequences], 192)
    with jax.enable_x64(True):
        value, grads = jax.tree.map(np.asarray, gradient(exact(), *batch))

    def by_formula(params):
        return -sum(map(partial(total, params), sequences)) / sum(len(s) - 1 for s in sequences)

    def total(params, tokens):
        scores = logprobs(textbook.hidden(CONFIG, params, tokens), params)
        return np.sum(scores[np.arange(len(tokens) - 1), tokens[1:]])

    np.testing.assert_allclose(value, by_formula(exact()), rtol=1e-11)
    assert_slopes(by_formula, exact(), grads, rtol=1e-4, atol=1e-13)


def test_padding_gets_no_gradient_and_gives_none():
    """Tokens under padding do not matter: neither the loss nor any gradient changes a bit. In
    float64, by the program of the test above."""
    (tokens, positions, segments), _ = pack([[sequence(70), sequence(40, seed=3)]], 192)
    other = np.where(segments < 0, 33, tokens)
    with jax.enable_x64(True):
        one = gradient(exact(), tokens, positions, segments)
        two = gradient(exact(), other, positions, segments)
    same = jax.tree.map(np.array_equal, one, two)
    assert all(jax.tree.leaves(same))


def test_axes_name_every_dimension():
    axes, shapes = MODEL.axes(), jax.eval_shape(MODEL.init, jax.random.key(0))
    is_axes = partial(lambda kind, x: isinstance(x, kind), tuple)
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(shapes)
    known = {"vocab", "embed", "heads", "mlp", "latent", None}
    sizes = {"vocab": 64, "embed": 64, "heads": 4, "mlp": 64, "latent": 24}
    for names, leaf in zip(
        jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(shapes), strict=True
    ):
        assert len(names) == leaf.ndim and set(names) <= known
        for name, size in zip(names, leaf.shape, strict=True):
            assert name is None or sizes[name] == size, (names, leaf.shape)


@pytest.mark.slow
def test_a_tensor_parallel_mesh_gives_the_same_loss_and_gradients():
    rules = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, PartitionSpec(*(rules.get(n) for n in names))),
        MODEL.axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    batch, _ = pack([[sequence(100)], [sequence(60, seed=1), sequence(40, seed=2)]], 128)
    want = gradient(weights(), *batch)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(
        jax.value_and_grad(loss),
        in_shardings=(shardings, rows, rows, rows),
        out_shardings=(None, shardings),
    )
    compiled = step.lower(weights(), *batch).compile(QUICK)
    assert "all-reduce" in str(compiled.as_text())
    got = compiled(jax.device_put(weights(), shardings), *(jax.device_put(x, rows) for x in batch))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_layers_follow_the_list():
    """A stack with the latent layer first keeps one token cache and two states; training in the
    expanded form and prefill in the absorbed one agree."""
    config = KimiLinearConfig(
        **{**vars(CONFIG), "layers": ("mla", "kda", "kda"), "gate_rank": None, "kv_latent": 24}
    )
    model = build_model(config)
    params = random_weights(model)
    assert [len(x) for x in model.cache_spec] == [1, 2]
    assert "down" not in params["blocks"]["block_1"]["mixer"]["gate"]
    tokens, zeros = sequence(128)[None], np.zeros((1, 128), np.int32)
    want = quick(model.forward)(params, tokens, np.arange(128)[None], zeros)
    pool = dense_pool(model.cache_spec, 1, 128)
    got, _ = quick(model.extend, static_argnums=6)(
        params, tokens, np.array([128]), np.array([0]), np.arange(1), pool, DENSE
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "change, said",
    [({"layers": ("kda", "mamba")}, "'mamba'"), ({"gate_lower_bound": -6.0}, "-6.0")],
)
def test_a_wrong_configuration_is_named(change, said):
    with pytest.raises(ValueError, match=said):
        KimiLinearConfig(**change)
