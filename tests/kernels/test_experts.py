"""Mixtures of experts: float64 oracle, gradients, padding, bits beside other tokens."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.experts import api, reference, triton_launch, xla
from rl_jax.sharding import make_mesh, make_trainer_mesh
from tests.fakes.compiling import QUICK

D, F, E, K = 12, 10, 5, 3


def case(tokens, seed=0, dtype=np.float32):
    """x, choices (a token's differ; every seventh token is padding), weights, gate, up, down."""
    random = np.random.default_rng(seed)
    choices = np.argsort(random.random((tokens, E)))[:, :K].astype(np.int32)
    choices[::7] = -1
    shapes = (tokens, D), (tokens, K), (E, D, F), (E, D, F), (E, F, D)
    x, weights, *matrices = (random.standard_normal(shape) for shape in shapes)
    return x.astype(dtype), choices, weights.astype(dtype), *(m.astype(dtype) for m in matrices)


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def with_gradients(function, case):
    """The output, then gradients of all operands but the choices."""
    x, choices, *rest = case
    out, pull = jax.vjp(lambda x, *rest: function(x, choices, *rest), x, *rest)
    return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


def distance(one, other):
    one, other = np.float64(one), np.float64(other)
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def test_values_and_gradients_are_those_of_every_expert_on_every_token():
    with jax.enable_x64(True):
        wanted = with_gradients(reference.mix, case(40, dtype=np.float64))
        exact = with_gradients(api.mix, case(40, dtype=np.float64))
        for one, other in zip(exact, wanted, strict=True):
            assert distance(one, other) < 1e-13
    for one, other in zip(with_gradients(api.mix, case(40)), wanted, strict=True):
        assert distance(one, other) < 1e-6


def test_a_choice_of_no_expert_adds_nothing_and_has_no_gradient():
    x, choices, weights, *matrices = case(8)
    choices[1, 0], x[0] = -1, np.inf
    given = x, choices, weights, *matrices
    out, d_x, d_weights, *_ = map(np.asarray, with_gradients(api.mix, given))
    assert not np.any(out[0]) and not np.any(d_x[0]) and not np.any(d_weights[0])
    assert d_weights[1, 0] == 0.0
    weights[1, 0] = x[0] = 0.0
    want = jax.jit(reference.mix, compiler_options=QUICK)(x, choices, weights, *matrices)
    np.testing.assert_allclose(out[1:], want[1:], rtol=1e-4, atol=1e-5)


mix = jax.jit(api.mix)


@pytest.mark.parametrize("name", ["alone among others", "all to one expert"])
def test_neighbours_change_no_bit(name):
    x, choices, weights, *matrices = case(64)
    own = mix(x, choices, weights, *matrices)
    others = case(64, seed=1)
    others[0][9] = x[9]
    if name == "all to one expert":
        others[1][:] = 2
    others[1][9] = choices[9]
    mixed = *others[:2], weights
    np.testing.assert_array_equal(mix(*mixed, *matrices)[9], own[9])


def wide(seed=0):
    """Rows [8, 16], of sizes that divide over every mesh."""
    random = np.random.default_rng(seed)
    choices = np.argsort(random.random((8, 16, 8)))[..., :K].astype(np.int32)
    choices[:, ::7] = -1
    shapes = (8, 16, 16), (8, 16, K), (8, 16, 8), (8, 16, 8), (8, 8, 16)
    x, *rest = (np.float32(random.standard_normal(shape)) for shape in shapes)
    return x, choices, *rest


@cache
def on_one_device():
    return jax.tree.map(np.asarray, with_gradients(api.mix, wide()))


def test_blocks_of_tokens_give_what_one_product_gives():
    blocks = with_gradients(partial(api.mix, block=24), wide())
    for one, other in zip(blocks, on_one_device(), strict=True):
        assert distance(one, other) < 1e-6


@pytest.mark.parametrize("place", ["experts and widths", "tokens", "sampler"])
def test_a_mesh_computes_what_one_device_does(place):
    devices = jax.devices()
    mesh = {
        "experts and widths": partial(make_trainer_mesh, devices, fsdp=2, expert=2, tensor=2),
        "tokens": partial(make_trainer_mesh, devices, context=2, expert=4),
        "sampler": partial(make_mesh, devices, 2, 4),
    }[place]()
    with jax.set_mesh(mesh):
        got = with_gradients(partial(api.mix, block=24), wide())
    for one, other in zip(jax.block_until_ready(got), on_one_device(), strict=True):
        assert distance(one, other) < 1e-6


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, jnp.zeros((8, D + 1)), "x: width 13 must be gate's 12"),
        (1, jnp.zeros((7, K), jnp.int32), r"choices: shape \(7, 3\) must be \(8,\)"),
        (2, jnp.zeros((8, K + 1)), r"weights: shape \(8, 4\) must be choices' \(8, 3\)"),
        (4, jnp.zeros((E, D, F + 1)), r"up: shape \(5, 12, 11\) must be gate's"),
        (5, jnp.zeros((E, D, F)), r"down: shape \(5, 12, 10\) must be \(5, 10, 12\)"),
        (5, jnp.zeros((E, F, D), jnp.bfloat16), "down: bfloat16 must be x's float32"),
    ],
)
def test_operands_that_do_not_fit_are_named(index, value, message):
    operands = list(map(jnp.asarray, case(8)))
    operands[index] = value
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(api.mix, "__wrapped__", api.mix)(*operands)


@pytest.mark.parametrize("sizes", [(0, 5, 40, 0, 1, 33, 0), (16, 32), (0, 0), (7,)])
def test_tiles_hold_every_row_of_every_group_once(sizes):
    """Of 16 rows each, for the kernels of GPUs; 20 rows belong to no group."""
    count = sum(sizes) + 20
    tiles = jax.jit(triton_launch.tiles, static_argnums=(1, 2), compiler_options=QUICK)
    groups, first, end = jax.device_get(tiles(np.array(sizes, np.int32), count, 16))
    found = [
        (int(group), row)
        for group, begin, stop in zip(groups, first, end, strict=True)
        for row in range(int(begin), min(int(begin) + 16, int(stop)))
    ]
    ends = np.cumsum(sizes)
    wanted = [(g, row) for g, n in enumerate(sizes) for row in range(ends[g] - n, ends[g])]
    assert sorted(found) == wanted


def test_rows_past_all_groups_may_hold_anything():
    """Also their gradients: the product of another backend may leave what was there."""
    given = case(40)

    def product(rows, matrices, sizes):
        here = jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes)

        @jax.custom_vjp
        def spoilt(rows, matrices):
            return jnp.where(here, xla.grouped(rows, matrices, sizes), jnp.nan)

        def pulled(kept, slopes):
            clean = [jnp.where(here, x, 0) for x in (kept[0], slopes)]
            pull = jax.vjp(lambda *x: xla.grouped(*x, sizes), clean[0], kept[1])[1]
            d_rows, d_matrices = pull(clean[1])
            return jnp.where(here, d_rows, jnp.nan), d_matrices

        spoilt.defvjp(lambda *x: (spoilt(*x), x), pulled)
        return spoilt(rows, matrices)

    spoilt = with_gradients(partial(xla.mix, product=product), given)
    clean = with_gradients(partial(xla.mix, product=xla.grouped), given)
    for one, other in zip(spoilt, clean, strict=True):
        np.testing.assert_array_equal(one, other)
