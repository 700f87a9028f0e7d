"""Layers whose heads or hidden width go in parts: one device's outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.layers import kda as kda_layer
from models.layers.context import rows_of
from models.layers.kda import KimiDeltaAttention
from models.layers.mla import LatentAttention
from models.layers.parameters import noted
from models.layers.parts import parts, summed
from models.layers.swiglu import SwiGLU
from rl_jax.sharding import CONTEXT, ROWS, make_trainer_mesh, param_shardings
from tests.fakes.compiling import QUICK

WIDTH, HEADS = 16, 8
SEGMENTS = jnp.asarray([[0] * 100 + [-1] * 28 + [1] * 100 + [-1] * 28, [0] * 256])


def delta(rngs):
    forms = {"decay_rank": 4, "gate_rank": 4, "lower_bound": None, "write_scale": 1.0}
    sizes = {"width": WIDTH, "heads": HEADS, "head_dim": 4, "taps": 4}
    return KimiDeltaAttention(**sizes, **forms, eps=1e-6, out_gain=1.0, rngs=rngs)


def latent(rngs):
    sizes = {"width": WIDTH, "heads": HEADS, "head_dim": 4, "latent": 8, "shared_key": 4}
    return LatentAttention(**sizes, eps=1e-6, out_gain=1.0, rngs=rngs)


def feed_forward(rngs):
    return SwiGLU(WIDTH, 4 * WIDTH, 1.0, rngs)


def run(make, x, mesh=None):
    """Output, then gradients of a sum with fixed weights."""
    graph, state = nnx.split(make(nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)
    mixes = make is not feed_forward

    def weighted(params, x):
        layer = nnx.merge(graph, params)
        out = layer.forward(x, rows_of(SEGMENTS)) if mixes else layer(x)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

    taken = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)
    if mesh is None:
        (_, out), grads = jax.jit(taken, compiler_options=QUICK)(params, x)
        return out, grads
    placed = jax.device_put(params, param_shardings(noted(state, "axes"), mesh))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(ROWS, CONTEXT)))
    with jax.set_mesh(mesh):
        (_, out), grads = jax.jit(taken, compiler_options=QUICK)(placed, x)
    return out, grads


@pytest.mark.parametrize("make", [delta, latent, feed_forward])
def test_a_part_after_the_other_gives_the_whole(make, monkeypatch):
    monkeypatch.setattr(kda_layer, "HEADS_AT_ONCE", 2)
    x = jax.random.normal(jax.random.key(1), (2, 256, WIDTH))
    mesh = make_trainer_mesh(jax.devices(), fsdp=2, tensor=2, context=2)
    wanted, got = run(make, x), run(make, x, mesh)
    for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        apart = np.linalg.norm(np.float64(one) - np.float64(other))
        assert apart <= 1e-5 * np.linalg.norm(np.float64(other))


def test_parts_are_the_fewest_that_are_small_enough_on_a_device():
    assert parts(32, 8) == 1
    with jax.set_mesh(make_trainer_mesh(jax.devices(), tensor=2, context=2)):
        assert [parts(32, most) for most in (16, 8, 5, 1)] == [1, 2, 4, 16]
    with jax.set_mesh(make_trainer_mesh(jax.devices(), fsdp=2, tensor=2)):
        assert parts(32, 8) == 1


def test_a_part_has_every_nth_of_what_is_named():
    layer = SwiGLU(2, 6, 1.0, nnx.Rngs(0))
    layer.gate[...] = jnp.arange(12.0).reshape(2, 6)
    layer.up[...], layer.down[...] = jnp.ones((2, 6)), jnp.ones((6, 2))
    shapes = []

    def look(part, x):
        shapes.append((part.gate[...].shape, part.down[...].shape))
        return x * part.gate[0, -1]

    out = summed(layer, "mlp", 3, look, jnp.ones(2))
    assert shapes == [((2, 2), (2, 2))]
    np.testing.assert_array_equal(out, np.full(2, 3.0 + 4.0 + 5.0))
