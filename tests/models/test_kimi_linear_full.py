"""The hybrid with everything of the released model: softplus gate, experts, dense first layer, head
of its own, heads of MLA unlike those of KDA, positions or none; and the K3 generation's gates."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.execution import Execution
from models.kimi_linear import KimiLinearConfig, build_model, kimi_linear_48b
from tests.fakes.cache import DENSE, dense_pool
from tests.models import textbook

NOPE = KimiLinearConfig(
    vocab_size=64, width=32, layers=("kda", "kda", "mla", "kda", "mla"),
    feed_forward=("dense", "experts", "experts", "experts", "experts"), tied=False,
    heads=2, head_dim=16, gate_rank=8, gate_lower_bound=None,
    mla_heads=4, mla_head_dim=8, value_dim=12, kv_latent=16, kv_shared_key=8,
    ffn_width=48, experts=6, chosen_experts=2, expert_width=16, shared_experts=1,
    route_scale=2.446,
)  # fmt: skip
ROPE = replace(NOPE, rope_theta=10000.0, query_latent=24, layers=("kda", "kda", "mla"),
               feed_forward=("dense", "experts", "experts"))  # fmt: skip
K3 = replace(
    ROPE, gate_lower_bound=-5.0, full_output_gate=True, negative_eigenvalues=True,
    rope_theta=None, renormalise=False, mla_head_dim=24, value_dim=24,
)  # fmt: skip
"""Heads as wide as that keep latent attention absorbed."""
pytestmark = pytest.mark.slow
CONFIGS = {"nope": NOPE, "rope": ROPE, "k3": K3}
LENGTH = 100


@cache
def made(name):
    """(config, model, params): biases that change choices, stronger decays than at first."""
    config = CONFIGS[name]
    model = build_model(config)
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    rng = np.random.default_rng(5)

    def moved(path, leaf):
        if path[-1].key == "router_bias":
            return rng.uniform(-0.2, 0.2, leaf.shape).astype(np.float32)
        if path[-1].key in ("scale", "decay_bias"):
            return leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32)
        return leaf

    return config, model, jax.tree_util.tree_map_with_path(moved, params)


def sequence(length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)


def packed(*sequences, rows=1, length=256):
    """All in row 0 (other rows padding), each from a multiple of 64 on."""
    tokens, positions = np.zeros((2, rows, length), np.int32)
    segments, start = np.full((rows, length), -1, np.int32), 0
    for number, own in enumerate(sequences):
        span = slice(start, start + len(own))
        tokens[0, span], positions[0, span], segments[0, span] = own, np.arange(len(own)), number
        start += -(-len(own) // 64) * 64
    return tokens, positions, segments


@cache
def forward(name):
    return jax.jit(made(name)[1].forward)


@cache
def extend(name):
    model = made(name)[1]
    run = model.routing.extend

    @jax.jit
    def step(params, tokens, n_valid, positions, pool):
        return run(params, tokens, n_valid, positions, jnp.arange(len(tokens)), pool, DENSE)

    return step


def feed(name, tokens, cuts):
    """Through `extend` as row 1 of 2, the other idle -> (hidden, choices)."""
    _, model, params = made(name)
    pool, start, hidden, choices = dense_pool(model.cache_spec, 2, 128), 0, [], []
    for size in cuts:
        n = min(size, len(tokens) - start)
        piece = np.full((2, size), 5, np.int32)
        piece[1, :n] = tokens[start : start + n]
        out, pool, own = extend(name)(params, piece, np.array([0, n]), np.array([7, start]), pool)
        hidden.append(np.asarray(out)[1, :n])
        choices.append(np.asarray(own)[1, :n])
        assert np.all(np.asarray(own)[0] == -1) and np.all(np.asarray(own)[1, n:] == -1)
        start += n
    assert start == len(tokens)
    return np.concatenate(hidden), np.concatenate(choices)


def scores(logits):
    """Log-probabilities, as programs compare them."""
    return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_follow_training(name):
    """Second trajectory of a packed row, whole prefill, prefill then token by token; that training
    follows the formulas is shown below in float64."""
    _, model, params = made(name)
    tokens, placed = sequence(), jax.tree.map(jnp.asarray, params)

    def logprobs(hidden):
        return scores(np.float64(model.head(placed, jnp.asarray(hidden), jnp.int32(0), 64)))

    hidden = np.asarray(forward(name)(params, *packed(sequence(70, seed=1), tokens)))[0]
    want = logprobs(hidden[128 : 128 + LENGTH])
    np.testing.assert_allclose(logprobs(feed(name, tokens, (128,))[0]), want, atol=1e-5)
    decoded, _ = feed(name, tokens, (64,) + (1,) * 36)
    np.testing.assert_allclose(logprobs(decoded), want, atol=1e-5)
    exact = np.float64(hidden) @ np.float64(params["head"][16:48]).T
    part = model.head(placed, jnp.asarray(hidden), jnp.int32(16), 32)
    np.testing.assert_allclose(part, exact, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_equal_the_formulas_in_float64(name):
    """Every leaf along a random direction; what moves is numpy's model, not ours."""
    config, model, params = made(name)
    tokens = sequence(70)
    towards = np.random.default_rng(1).standard_normal((70, config.width))
    exact = jax.tree.map(np.float64, params)
    with jax.enable_x64(True):

        def value(params):
            hidden = model.forward(params, *map(jnp.asarray, packed(tokens, length=128)))
            return jnp.sum(hidden[0, :70] * towards), hidden[0, :70]

        made_here = jax.jit(jax.grad(value, has_aux=True))(exact)
        slopes, hidden = jax.tree.map(np.asarray, made_here)
    np.testing.assert_allclose(hidden, textbook.hidden(config, exact, tokens), atol=1e-11)
    leaves, structure = jax.tree_util.tree_flatten_with_path(exact)
    rng = np.random.default_rng(2)
    for i, ((path, leaf), slope) in enumerate(zip(leaves, jax.tree.leaves(slopes), strict=True)):
        step = rng.standard_normal(leaf.shape)
        step *= 1e-6 / np.linalg.norm(step)
        values = [leaf for _, leaf in leaves]
        ends = []
        for sign in (1, -1):
            values[i] = leaf + sign * step
            moved = jax.tree.unflatten(structure, values)
            ends.append(np.sum(textbook.hidden(config, moved, tokens) * towards))
        if path[-1].key == "router_bias" or path[0].key == "head":
            assert not np.any(slope), path
        want = (ends[0] - ends[1]) / 2
        np.testing.assert_allclose(
            np.sum(slope * step), want, rtol=1e-5, atol=1e-13, err_msg=str(path)
        )


def test_positions_turn_attention_and_nothing_else():
    """Without positions a shifted start changes nothing; with them only differences count."""
    for name in ("nope", "rope"):
        _, _, params = made(name)
        tokens, positions, segments = packed(sequence())
        want = forward(name)(params, tokens, positions, segments)
        moved = forward(name)(params, tokens, positions + 1000, segments)
        mixed = forward(name)(params, tokens, positions[:, ::-1], segments)
        np.testing.assert_allclose(moved, want, atol=1e-4)
        assert np.array_equal(mixed, want) == (name == "nope")


def test_rows_do_not_influence_each_other():
    """Bits of row 0 beside padding and beside other rows, in training."""
    _, _, params = made("nope")
    tokens, positions, segments = packed(sequence(), sequence(70, seed=1), rows=3)
    want = np.asarray(forward("nope")(params, tokens, positions, segments))
    tokens[1:], segments[1:], positions[1:] = sequence(512, seed=3).reshape(2, 256), 0, range(256)
    beside = np.asarray(forward("nope")(params, tokens, positions, segments))
    valid = segments[0] >= 0
    assert np.array_equal(beside[0, valid], want[0, valid])


EXECUTIONS = [
    Execution(scan=True, remat="block"),
    Execution(scan=True),
    Execution(remat="dots"),
]
DEEP = replace(
    NOPE, layers=("kda",) + ("kda", "mla") * 2, feed_forward=("dense",) + ("experts",) * 4
)


@cache
def slopes(execution):
    model = build_model(DEEP, execution)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens, positions, segments = map(jnp.asarray, packed(sequence(), length=128))
    replayed = jnp.full((1, 128, 4, 2), -1, jnp.int32).at[:, :50].set(jnp.arange(2) + 3)

    def value(params):
        hidden, own = model.routing.forward(params, tokens, positions, segments, replayed)
        return jnp.sum(jnp.sin(hidden) * (segments >= 0)[..., None]), own

    (value, own), slope = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
    return value, np.asarray(own), slope


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
def test_every_execution_gives_the_same_with_choices_replayed(execution):
    value, own, slope = slopes(Execution())
    got, choices, got_slope = slopes(execution)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    assert np.array_equal(choices, own)
    for a, b in zip(jax.tree.leaves(got_slope), jax.tree.leaves(slope), strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b) + 1e-9


def test_bfloat16_stays_near_and_in_bfloat16():
    """With the same experts values to bfloat16's rounding over three layers; most choices are the
    same; gradients come back in float32."""
    _, model, params = made("rope")
    short = build_model(ROPE, Execution(compute="bfloat16"))
    batch = tuple(map(jnp.asarray, packed(sequence(), length=128)))
    want, exact = jax.jit(model.routing.forward)(params, *batch, None)
    hidden, own = jax.jit(short.routing.forward)(params, *batch, exact)
    assert hidden.dtype == jnp.bfloat16
    valid = np.asarray(batch[2] >= 0)
    off = np.float32(hidden)[valid] - np.asarray(want)[valid]
    assert np.sqrt(np.mean(off**2)) < 0.05 * np.sqrt(np.mean(np.asarray(want)[valid] ** 2))
    assert np.mean(np.asarray(own)[valid] == np.asarray(exact)[valid]) > 0.9
    slope = jax.jit(jax.grad(lambda p: jnp.sum(short.forward(p, *batch).astype(jnp.float32) ** 2)))
    for leaf in jax.tree.leaves(slope(params)):
        assert leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf))
    pool = dense_pool(short.cache_spec, 1, 128)
    for size in (64, 1):
        tokens = batch[0][:, :size]
        got, pool = jax.jit(short.extend, static_argnums=6)(
            params, tokens, np.array([size]), np.array([0]), np.arange(1), pool, DENSE
        )
        assert got.dtype == jnp.bfloat16 and np.all(np.isfinite(np.float32(got)))


def test_choices_of_the_sampler_replay_in_the_trainer():
    """The trainer's own differ nowhere; foreign ones are used, and its own are still told."""
    _, model, params = made("nope")
    tokens = sequence()
    _, sampled = feed("nope", tokens, (64,) + (1,) * 36)
    run = jax.jit(model.routing.forward)
    batch = packed(tokens, length=128)
    plain, own = run(params, *batch, None)
    assert own.shape == (1, 128, 4, 2) and np.array_equal(own[0, :LENGTH], sampled)
    assert np.all(np.asarray(own)[0, LENGTH:] == -1)
    same, _ = run(params, *batch, own)
    np.testing.assert_allclose(same, plain, atol=1e-6)
    foreign = np.array(own)
    foreign[0, 10, 3] = [e for e in range(6) if e not in foreign[0, 10, 3]][:2]
    other, told = run(params, *batch, foreign)
    changed = np.any(np.asarray(other != plain), -1)[0]
    assert changed[10] and not np.any(changed[:10])
    assert np.array_equal(np.asarray(told)[0, :11], np.asarray(own)[0, :11])


def test_balancing_moves_every_layers_bias_against_its_load():
    _, model, params = made("nope")
    load = np.tile(np.int32([10, 0, 5, 5, 5, 5]), (4, 1))
    load[2] = load[2, ::-1]
    moved = jax.jit(model.routing.balance)(params, load, 0.001)
    steps = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), moved, params)
    for number, layer in enumerate((1, 2, 3, 4)):
        want = np.sign(5 - load[number]) * 0.001
        ffn = steps["blocks"][f"block_{layer}"]["ffn"]
        np.testing.assert_allclose(ffn.pop("router_bias"), want, atol=1e-7)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(steps))


def test_the_released_sizes():
    """Counts of algorithms' tables: 48 billion parameters, 3 of them active, 576 cached numbers."""
    config = kimi_linear_48b()
    model = build_model(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    block = shapes["blocks"]["block_1"]["ffn"]
    expert = sum(block[name].size for name in ("gate", "up", "down")) // 256
    active = count - 26 * (256 - 8) * expert - shapes["embedding"].size
    assert 48e9 < count < 50e9 and 2.7e9 < active < 3.5e9
    assert config.layers.count("mla") == 7 and config.layers[-1] == "mla"
    assert [c.width for c in model.cache_spec.tokens] == [576] * 7
    assert model.routing is not None and model.routing[:3] == (26, 256, 8)
    axes = model.axes()["blocks"]["block_1"]["ffn"]
    assert axes["gate"] == ("experts", "embed", "expert_mlp")


def test_the_first_decays_are_those_of_the_paper():
    """softplus(bias) in [1e-3, 0.1], factors in [1, 16]."""
    params = jax.jit(build_model(NOPE).init)(jax.random.key(3))
    mixer = params["blocks"]["block_0"]["mixer"]
    steps, factor = np.log1p(np.exp(mixer["decay_bias"])), np.exp(mixer["decay_rate_log"])
    assert np.all((steps > 0.99e-3) & (steps < 0.101)) and np.ptp(np.log(steps)) > 2
    assert np.all((factor >= 1) & (factor <= 16)) and np.ptp(factor) > 0


@pytest.mark.parametrize(
    "change, said",
    [
        ({"feed_forward": ("dense",)}, "feed_forward: 1 entries must be as many as layers, 5"),
        ({"feed_forward": ("sparse",) * 5}, "feed_forward: 'sparse' is not a layer"),
        ({"experts": 0}, "experts: 0 must be at least 1"),
        ({"chosen_experts": 7}, "chosen_experts: 7 must be at most experts, 6"),
        ({"rope_theta": 1e4, "kv_shared_key": 7}, "kv_shared_key: 7 must be even"),
    ],
)
def test_a_wrong_configuration_is_named(change, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        replace(NOPE, **change)
