"""The hybrid policy: packing and prefill bit for bit, decode within 1e-5, gradients, meshes."""

from functools import partial

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

CONFIG = KimiLinearConfig(
    vocab_size=64, width=64, heads=4, head_dim=16, kv_latent=16, kv_shared_key=8, ffn_width=64,
    gate_rank=8, layers=("kda", "mla", "kda"),
)  # fmt: skip
MODEL = build_model(CONFIG)
quick = partial(jax.jit, compiler_options=QUICK)
PARAMS = quick(MODEL.init)(jax.random.key(0))
CONTEXT, ROWS = 256, 4
"""Of a pool; one number of rows, so that all tests share a width's program."""
forward = jax.jit(MODEL.forward)


@jax.jit
def extend(tokens, n_valid, positions, pages, pool):
    return MODEL.extend(PARAMS, tokens, n_valid, positions, pages, pool, DENSE)


@quick
def logprobs(hidden):
    return jax.nn.log_softmax(MODEL.head(PARAMS, hidden, jnp.asarray(0), CONFIG.vocab_size))


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
    batch, _ = pack([[tokens]], CONTEXT)
    return np.asarray(forward(PARAMS, *batch))[0, : len(tokens)]


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


def test_a_packed_row_equals_each_trajectory_alone_bit_for_bit():
    sequences = [sequence(n, seed=n) for n in (1, 65, 17, 256, 130, 64)]
    batch, places = pack([sequences[:3], [sequences[3]], sequences[4:]], 320)
    hidden = np.asarray(forward(PARAMS, *batch))
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


@pytest.mark.parametrize("cuts", [(64, 64, 64), (128, 64), (64, 128), (192,)])
def test_prefill_at_multiples_of_64_equals_training_bit_for_bit(cuts):
    tokens = sequence(150)
    hidden, _ = feed(tokens, cuts, dense_pool(MODEL.cache_spec, ROWS, CONTEXT))
    assert np.array_equal(hidden, alone(tokens))


@pytest.mark.parametrize("cuts", [(64,) + (1,) * 86, (16,) * 10, (64, 5, 1, 64, 1, 16)])
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


def textbook(layer, x):
    """Latent attention of one sequence x[L, D] by its formula."""
    q = jnp.einsum("ld,dha->hla", x, layer.query[...])
    down = x @ layer.down[...]
    latents, shared = layer.norm(down[:, : layer.latent]), down[:, layer.latent :]
    keys = jnp.einsum("lc,hac->hla", latents, layer.key_up[...])
    shared = jnp.broadcast_to(shared, (len(keys), *shared.shape))
    scores = jnp.einsum("hla,hma->hlm", q, jnp.concatenate([keys, shared], -1)) * layer.scale
    scores = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), scores, -jnp.inf)
    values = jnp.einsum("lc,hca->hla", latents, layer.value_up[...])
    return jnp.einsum("hlm,hma,had->ld", jax.nn.softmax(scores, -1), values, layer.out[...])


@pytest.mark.parametrize(
    ("latent", "kind"), [(24, "attend_heads"), (16, "attend_rows"), (8, "attend_rows")]
)
def test_latent_attention_takes_the_form_of_fewer_products(monkeypatch, latent, kind):
    """Heads of 16 numbers: expanded below the latent's width. Values and gradients of either form
    equal the formula, for two sequences in one row."""
    layer = LatentAttention(
        width=32, heads=4, head_dim=16, latent=latent, shared_key=8, eps=1e-5, out_gain=1.0,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    rng, lengths = np.random.default_rng(0), (64, 40)
    x, weights = rng.standard_normal((2, 1, 128, 32)).astype(np.float32)
    segments = np.where(np.arange(128) < 64, 0, np.where(np.arange(128) < 104, 1, -1))[None]
    asked = []

    def heard(name, run, *operands, **keywords):
        asked.append(name)
        return run(*operands, **keywords)

    for name in ("attend_heads", "attend_rows"):
        monkeypatch.setattr(mla, name, partial(heard, name, getattr(mla, name)))
    parts = [slice(64 * i, 64 * i + n) for i, n in enumerate(lengths)]

    def packed(x):
        out = layer.forward(x, rows_of(jnp.asarray(segments)))
        return sum(jnp.sum(out[0, part] * weights[0, part]) for part in parts), out

    def apart(x):
        outs = [textbook(layer, x[0, part]) for part in parts]
        return sum(jnp.sum(o * weights[0, part]) for o, part in zip(outs, parts, strict=True)), outs

    with jax.default_matmul_precision("highest"):
        (_, got), slope = quick(jax.value_and_grad(packed, has_aux=True))(x)
        (_, want), want_slope = quick(jax.value_and_grad(apart, has_aux=True))(x)
    assert set(asked) == {kind}
    for part, expected in zip(parts, want, strict=True):
        np.testing.assert_allclose(got[0, part], expected, atol=1e-5)
        np.testing.assert_allclose(slope[0, part], want_slope[0, part], atol=1e-4)


def test_training_in_expanded_form_and_prefill_in_absorbed_form_agree():
    config = KimiLinearConfig(**{**vars(CONFIG), "kv_latent": 24, "layers": ("mla",)})
    model = build_model(config)
    params = quick(model.init)(jax.random.key(1))
    tokens, zeros = sequence(128)[None], np.zeros((1, 128), np.int32)
    want = quick(model.forward)(params, tokens, np.arange(128)[None], zeros)
    pool = dense_pool(model.cache_spec, 1, 128)
    got, _ = quick(model.extend, static_argnums=6)(
        params, tokens, np.array([128]), np.array([0]), np.arange(1), pool, DENSE
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_head_slices_make_the_whole():
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, CONFIG.width)), jnp.float32)
    want = np.asarray(hidden, np.float64) @ np.asarray(PARAMS["embedding"], np.float64).T
    sliced = quick(MODEL.head, static_argnums=3)
    parts = [
        sliced(PARAMS, hidden, jnp.asarray(start), 16) for start in range(0, CONFIG.vocab_size, 16)
    ]
    np.testing.assert_allclose(np.concatenate(parts, -1), want, atol=1e-5)


def loss(params, tokens, positions, segments):
    """Mean cross-entropy of the next token over valid positions."""
    hidden = MODEL.forward(params, tokens, positions, segments)
    scores = jax.nn.log_softmax(hidden @ params["embedding"].T)
    chosen = jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    valid = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return -jnp.sum(jnp.where(valid, chosen, 0.0)) / jnp.sum(valid)


gradient = quick(jax.value_and_grad(loss))


def test_gradients_equal_finite_differences_in_float64():
    """Along a random direction of every leaf; in float64 the chunk form is exact to 1e-9."""
    batch, _ = pack([[sequence(70), sequence(30, seed=2)]], 192)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), PARAMS)
        value = quick(loss)
        grads = quick(jax.grad(loss))(params, *batch)
        leaves, structure = jax.tree.flatten(params)
        rng = np.random.default_rng(0)
        for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
            direction = rng.standard_normal(leaf.shape)
            direction *= 1e-5 / np.linalg.norm(direction)

            def moved(sign, i=i, leaf=leaf, direction=direction):
                changed = [*leaves[:i], leaf + sign * direction, *leaves[i + 1 :]]
                return float(value(jax.tree.unflatten(structure, changed), *batch))

            slope = (moved(1) - moved(-1)) / 2
            np.testing.assert_allclose(np.sum(grad * direction), slope, rtol=1e-4, atol=1e-13)


def test_padding_gets_no_gradient_and_gives_none():
    """Tokens under padding do not matter: neither the loss nor any gradient changes a bit."""
    (tokens, positions, segments), _ = pack([[sequence(70)], [sequence(40, seed=3)]], 128)
    other = np.where(segments < 0, 33, tokens)
    one = gradient(PARAMS, tokens, positions, segments)
    two = gradient(PARAMS, other, positions, segments)
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), one, two)
    assert all(jax.tree.leaves(same))


def test_axes_name_every_dimension():
    axes = MODEL.axes()
    is_axes = partial(lambda kind, x: isinstance(x, kind), tuple)
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(PARAMS)
    known = {"vocab", "embed", "heads", "mlp", "latent", None}
    sizes = {"vocab": 64, "embed": 64, "heads": 4, "mlp": 64, "latent": 24}
    for names, leaf in zip(
        jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(PARAMS), strict=True
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
    want = gradient(PARAMS, *batch)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(
        jax.value_and_grad(loss),
        in_shardings=(shardings, rows, rows, rows),
        out_shardings=(None, shardings),
    )
    compiled = step.lower(PARAMS, *batch).compile(QUICK)
    assert "all-reduce" in str(compiled.as_text())
    got = compiled(jax.device_put(PARAMS, shardings), *(jax.device_put(x, rows) for x in batch))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_layers_follow_the_list():
    """A stack with the latent layer first keeps one token cache and one state, and still agrees."""
    config = KimiLinearConfig(**{**vars(CONFIG), "layers": ("mla", "kda"), "gate_rank": None})
    model = build_model(config)
    params = quick(model.init)(jax.random.key(1))
    assert [len(x) for x in model.cache_spec] == [1, 1]
    assert "down" not in params["blocks"]["block_1"]["mixer"]["gate"]
    tokens = sequence(64)[None]
    zeros = np.zeros((1, 64), np.int32)
    want = quick(model.forward)(params, tokens, np.arange(64)[None], zeros)
    pool = dense_pool(model.cache_spec, 1, 64)
    got, _ = quick(model.extend, static_argnums=6)(
        params, tokens, np.array([64]), np.array([0]), np.arange(1), pool, DENSE
    )
    assert np.array_equal(got, want)


@pytest.mark.parametrize(
    "change, said",
    [({"layers": ("kda", "mamba")}, "'mamba'"), ({"gate_lower_bound": -6.0}, "-6.0")],
)
def test_a_wrong_configuration_is_named(change, said):
    with pytest.raises(ValueError, match=said):
        KimiLinearConfig(**change)
