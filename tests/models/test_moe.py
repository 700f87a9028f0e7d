"""The mixture of experts against its formula in float64, and the router on numbers made by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.moe import MixtureOfExperts, balanced
from tests.fakes.compiling import QUICK
from tests.models import textbook
from tests.models.slopes import assert_slopes

WIDTH, EXPERTS, CHOSEN = 16, 6, 2


def layer(chosen=CHOSEN, shared=1, scale=2.446, renormalise=True, seed=0):
    """(graph, params in numpy); a bias that changes choices."""
    sizes = WIDTH, EXPERTS, chosen, 8, shared, scale, renormalise, 1.0
    graph, state = nnx.split(nnx.eval_shape(lambda: MixtureOfExperts(*sizes, nnx.Rngs(0))))
    random = np.random.default_rng(seed)

    def one(path, leaf):
        if path[-1].key == "router_bias":
            return random.uniform(-0.3, 0.3, leaf.shape).astype(np.float32)
        return random.normal(0, leaf.shape[-2] ** -0.5, leaf.shape).astype(np.float32)

    return graph, jax.tree_util.tree_map_with_path(one, nnx.to_pure_dict(state))


def plainly(graph, params, x, valid=None, replayed=None):
    valid = jnp.ones(x.shape[:2], bool) if valid is None else jnp.asarray(valid)
    return nnx.merge(graph, params)(x, valid, replayed)


run = jax.jit(plainly, static_argnums=0, compiler_options=QUICK)


def inputs(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal((*shape, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("made", [{"shared": 2}, {"shared": 0, "renormalise": False, "chosen": 1}])
def test_values_and_gradients_equal_the_formula_in_float64(made):
    graph, params = layer(**made)
    route = {"chosen": CHOSEN, "scale": 2.446, **made}
    if shared := route.pop("shared"):
        assert params["shared"]["up"].shape == (WIDTH, 8 * shared)
    with jax.enable_x64(True):
        params, x = jax.tree.map(np.float64, (params, inputs(2, 12)))
        towards = np.random.default_rng(2).standard_normal(x.shape)

        def total(params, x):
            out, own = plainly(graph, params, x)
            return jnp.sum(out * towards), (out, own)

        run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), compiler_options=QUICK)
        (_, (out, own)), slopes = jax.tree.map(np.asarray, run(params, x))
    want, choices = textbook.experts(x.reshape(-1, WIDTH), params, **route)
    np.testing.assert_array_equal(own.reshape(choices.shape), choices)
    np.testing.assert_allclose(out.reshape(want.shape), want, rtol=1e-12)

    def value(at):
        params, x = at
        out, _ = textbook.experts(x.reshape(-1, WIDTH), params, **route)
        return np.sum(out * towards.reshape(-1, WIDTH))

    assert_slopes(value, (params, x), slopes, rtol=1e-5, atol=1e-12)


def by_hand(chosen, bias):
    """Scores .5, .75, .25 of one token; expert e gives the unit vector e, so the output is the
    weights."""
    gate = np.full((3, 4, 1), 0.0, np.float32)
    gate[:, 0] = 1.0
    up = gate * np.float32((1 + np.exp(-1.0)) / 1.0)  # silu(1) = 1 / (1 + e^-1)
    down = np.zeros((3, 1, 4), np.float32)
    down[np.arange(3), 0, np.arange(3)] = 1.0
    router = np.zeros((4, 3), np.float32)
    router[0] = 0.0, np.log(3.0), -np.log(3.0)
    sizes = 4, 3, chosen, 1, 0, 2.446, True, 1.0
    graph, _ = nnx.split(nnx.eval_shape(lambda: MixtureOfExperts(*sizes, nnx.Rngs(0))))
    params = {"router": router, "router_bias": np.float32(bias), "gate": gate, "up": up}
    x = np.float32([[[1, 0, 0, 0]]])
    out, own = run(graph, params | {"down": down}, x)
    return np.asarray(out)[0, 0, :3], np.asarray(own)[0, 0].tolist()


def test_the_bias_changes_the_choice_and_not_the_weights():
    out, own = by_hand(2, [0, 0, 0])
    assert own == [1, 0]
    np.testing.assert_allclose(out, np.array([0.4, 0.6, 0]) * 2.446, rtol=1e-6)
    out, own = by_hand(2, [0, 0, 0.3])  # .25 + .3 beats .5
    assert own == [1, 2]
    np.testing.assert_allclose(out, np.array([0, 0.75, 0.25]) * 2.446, rtol=1e-6)
    out, own = by_hand(2, [0.3, 0, 0])  # another order, the same two
    assert own == [0, 1]
    np.testing.assert_allclose(out, np.array([0.4, 0.6, 0]) * 2.446, rtol=1e-6)


def test_of_equal_scores_the_lower_number_is_taken():
    graph, params = layer(chosen=3)
    params |= {"router": np.zeros_like(params["router"])}
    params["router_bias"] = np.float32([0, 0.5, 0, 0, 0.5, 0])
    _, own = run(graph, params, inputs(1, 5))
    assert np.asarray(own).tolist() == [[[1, 4, 0]] * 5]


def test_padding_chooses_nothing_and_takes_no_expert():
    graph, params = layer(shared=0)
    valid = np.array([[True, False, True], [False, False, True]])
    x = inputs(2, 3)
    out, own = run(graph, params, x, valid, jnp.full((2, 3, CHOSEN), 3, jnp.int32))
    assert np.array_equal(np.asarray(own)[..., 0] >= 0, valid)
    assert np.all(np.asarray(out)[~valid] == 0) and np.all(np.asarray(out)[valid] != 0)
    other = np.where(valid[..., None], x, 1e3).astype(np.float32)
    again, _ = run(graph, params, other, valid, jnp.full((2, 3, CHOSEN), 3, jnp.int32))
    assert np.array_equal(out[valid], again[valid])


def test_replayed_choices_are_used_and_own_ones_told():
    """A row of -1 takes its own; weights are the current scores of the experts really used."""
    graph, params = layer()
    x, replayed = inputs(1, 3), np.int32([[[5, 0], [-1, -1], [2, 3]]])
    plain, own = run(graph, params, x)
    out, told = run(graph, params, x, replayed=jnp.asarray(replayed))
    assert np.array_equal(told, own)
    assert np.array_equal(out[0, 1], plain[0, 1])
    forced = params | {"router_bias": np.float32([1e3, 0, 0, 0, 0, 2e3])}  # chooses (5, 0)
    assert np.array_equal(out[0, 0], run(graph, forced, x)[0][0, 0])
    same, _ = run(graph, params, x, replayed=own)
    assert np.array_equal(same, plain)


def test_no_gradient_reaches_the_bias_and_some_the_router():
    graph, params = layer()
    x, replayed = (
        jnp.asarray(inputs(1, 8)),
        jnp.full((1, 8, CHOSEN), 2, jnp.int32).at[..., 1].set(4),
    )
    loss = jax.grad(lambda p: jnp.sum(plainly(graph, p, x, replayed=replayed)[0] ** 2))
    slopes = jax.jit(loss, compiler_options=QUICK)(params)
    assert not np.any(slopes["router_bias"])
    assert np.any(slopes["router"], 0).tolist() == [False, False, True, False, True, False]


def test_balancing_moves_a_bias_against_its_load():
    bias, load = jnp.float32([0.1, 0.2, 0.3, 0.0]), jnp.int32([0, 4, 9, 3])
    np.testing.assert_allclose(balanced(bias, load, 0.01), [0.11, 0.2, 0.29, 0.01], rtol=1e-6)


@pytest.mark.parametrize("length", [1, 64])
def test_a_rows_bits_do_not_depend_on_its_neighbours(length):
    """Beside padding, beside others, and beside others that all choose its experts."""
    graph, params = layer()
    jitted = jax.jit(partial(plainly, graph))
    x, valid = inputs(4, length), np.arange(4)[:, None] < np.full(length, 1)
    quiet = jitted(params, x, valid)[0][0]
    other = np.concatenate([x[:1], 7 * inputs(3, length, seed=5)])
    crowd = np.concatenate([x[:1]] * 4)
    for rows in (x, other, crowd):
        assert np.array_equal(quiet, jitted(params, rows, np.ones_like(valid))[0][0])
    turned = jitted(params, other[::-1], np.ones_like(valid))[0]
    assert np.array_equal(quiet, turned[-1])
    if length == 64:
        assert np.array_equal(quiet, jitted(params, x[:1], valid[:1])[0][0])


def test_bfloat16_keeps_the_router_exact():
    """Choices of a bfloat16 input are those of its exact value; outputs agree to bfloat16."""
    graph, params = layer()
    x = jnp.asarray(inputs(1, 32), jnp.bfloat16)
    want, own = run(graph, params, x.astype(jnp.float32))
    out, told = run(graph, params, x)
    assert out.dtype == jnp.bfloat16 and np.array_equal(told, own)
    np.testing.assert_allclose(np.float32(out), want, atol=0.03 * float(np.abs(want).max()))
