"""Kernels that XLA cannot cut, on a mesh: each device runs its own rows and heads."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.kda import context
from rl_jax.kernels.mla import api as mla
from rl_jax.sharding import make_mesh
from tests.fakes.compiling import QUICK
from tests.kernels.kda_cases import case

R, L, H = 4, 128, 4
COLLECTIVES = "all-gather", "all-to-all", "all-reduce", "collective-permute"


@pytest.fixture
def seen(monkeypatch):
    """Shapes of q that the opaque stand-ins of both kernels got: XLA forms under that name."""
    shapes = []

    def opaque(api, field):
        plain = getattr(api.BACKENDS["xla"], field)

        def run(q, *operands, **options):
            shapes.append(q.shape)
            return plain(q, *operands, **options)

        stand_in = api.BACKENDS["xla"]._replace(**{field: run}, opaque=True)
        monkeypatch.setattr(api, "BACKENDS", {"stand_in": stand_in})

    opaque(kda, "chunked")
    opaque(mla, "attend_heads")
    return shapes


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def delta():
    """(function of differentiable operands, the operands): every output of `chunked`."""
    packs = ((128,), (64, 64), (65,), (1, 60))
    made = [case(packs, length=L, seed=seed) for seed in range(H // 2)]
    axes = 2, 2, 2, 2, 2, 1
    operands = tuple(
        np.concatenate([one.operands[i] for one in made], axis) for i, axis in enumerate(axes)
    )
    return partial(kda.chunked, reset=jnp.asarray(made[0].reset), export=True), operands


def attention():
    segments = np.arange(L) // 64 + np.zeros((R, 1), np.int32)
    segments[1, 100:], segments[2] = -1, 0
    operands = tuple(normal(R, L, H, width, seed=width) for width in (12, 12, 8))
    operands = operands[0], operands[1] + 1, operands[2]
    given = jnp.asarray(segments, jnp.int32)
    return lambda *x: (mla.attend_heads(*x, given, scale=0.3),), operands


def with_gradients(function):
    """Outputs, then cotangents of every operand for weights that differ everywhere."""

    def run(*operands):
        out, pull = jax.vjp(function, *operands)
        return (*out, *pull(tuple(jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in out)))

    return run


@cache
def alone(made):
    """On one device."""
    function, operands = made()
    run = jax.jit(with_gradients(function), compiler_options=QUICK)
    return jax.tree.map(np.asarray, run(*operands))


def cut(mesh, x):
    """As the model's activations lie: rows over data, heads over tensor."""
    heads = next(axis for axis in (2, 1) if x.shape[axis] == H)
    spec = PartitionSpec("data", *(None,) * (heads - 1), "tensor")
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("made", "data", "tensor"), [(delta, 2, 4), (attention, 2, 4), (attention, 1, 1)]
)
def test_a_mesh_computes_what_one_device_does_without_gathering(made, data, tensor, seen):
    function, operands = made()
    wanted = alone(made)
    del seen[:]
    mesh = make_mesh(jax.devices(), data, tensor)
    placed = [cut(mesh, x) for x in operands]
    with jax.set_mesh(mesh):
        compiled = jax.jit(with_gradients(function)).lower(*placed).compile(QUICK)
    got = compiled(*(jax.device_put(x, p.sharding) for x, p in zip(operands, placed, strict=True)))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 * np.abs(other).max())
    assert {shape[:3] for shape in seen} == {(R // data, L, H // tensor)}
    assert [name for name in COLLECTIVES if name in compiled.as_text()] == []
    for x, place in zip(got[-len(operands) :], placed, strict=True):
        assert x.sharding.is_equivalent_to(place.sharding, x.ndim)


def test_inside_another_shard_map_a_kernel_is_called_as_it_is(seen):
    """Context parallelism cuts tokens, and leaves rows and heads whole."""
    operands = delta()[1]
    wanted = jax.jit(kda.chunked, compiler_options=QUICK)(*operands)
    del seen[:]
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("context",))
    tokens, whole = PartitionSpec(None, "context"), PartitionSpec()
    run = jax.shard_map(
        partial(context.chunked, kda.chunked, axis="context"),
        in_specs=((tokens,) * 5 + (whole,)),
        out_specs=(tokens, whole),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        got = jax.jit(run, compiler_options=QUICK)(*operands)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert {shape[:3] for shape in seen} == {(R, L // 2, H)}


def test_without_a_mesh_a_kernel_is_called_as_it_is(seen):
    function, operands = delta()
    jax.eval_shape(function, *operands)
    assert [shape[:3] for shape in seen] == [(R, L, H)]


@pytest.mark.parametrize(
    ("data", "tensor", "message"),
    [
        (3, 1, r"q: 4 of shape \(4, 128, 4, 16\) must be a multiple of the mesh's data = 3"),
        (1, 3, r"q: 4 of shape \(4, 128, 4, 16\) must be a multiple of the mesh's tensor = 3"),
    ],
)
def test_rows_and_heads_that_do_not_divide_are_named(data, tensor, message, seen):
    function, operands = delta()
    mesh = make_mesh(jax.devices(), data, tensor)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(function, *operands)
    assert seen == []
