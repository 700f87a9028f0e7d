"""Attention with fewer keys than queries: groups of heads in training, narrow queries on pages."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.kernels.mla import api, pallas_tpu, reference
from rl_jax.sharding import make_mesh
from tests.fakes.compiling import QUICK

HEADS, GROUPS, WIDTH, VALUE = 4, 2, 12, 8
LENGTHS = 64, 70
SEGMENTS = np.where(np.arange(192) < 64, 0, np.where(np.arange(192) < 134, 1, -1))[None]


def operands() -> list[np.ndarray]:
    """q, k, v and weights of the outputs, for one row of two sequences."""
    random = np.random.default_rng(0)
    shapes = (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, VALUE), (HEADS, VALUE)
    return [random.standard_normal((1, 192, *shape)).astype(np.float32) for shape in shapes]


def slopes(attend, q, k, v, weights):
    """The outputs, and the gradients of their weighted sum, zeros on padding."""
    weights = weights * (SEGMENTS >= 0)[..., None, None]

    def objective(*given):
        out = attend(*given)
        return jnp.sum(out * weights), out

    run = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)
    (_, out), gradients = jax.jit(run, compiler_options=QUICK)(q, k, v)
    return [np.asarray(x) for x in (out, *gradients)]


def textbook(q, k, v):
    """Each sequence alone, keys and values written out for every head."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, 2) for x in (k, v))
    parts = [slice(0, 64), slice(64, 134)]
    outs = [reference.attend_heads(q[0, p], k[0, p], v[0, p], scale=0.3) for p in parts]
    padding = jnp.zeros((192 - 134, HEADS, VALUE), q.dtype)
    return jnp.concatenate([*outs, padding])[None]


@cache
def exact() -> list[np.ndarray]:
    with jax.enable_x64(True):
        return slopes(textbook, *map(np.float64, operands()))


@pytest.mark.parametrize("opaque", [False, True], ids=["as groups", "a kernel of every head"])
def test_values_and_gradients_are_those_of_repeated_keys(monkeypatch, opaque: bool) -> None:
    """A backend that has no groups gets keys for every head, and their gradients are added up."""
    plain, counts = api.BACKENDS["xla"], []

    def heard(q, k, v, segments, *, scale):
        counts.append((k.shape[2], v.shape[2]))
        return plain.attend_heads(q, k, v, segments, scale=scale)

    own = plain._replace(opaque=opaque, attend_heads=heard)
    monkeypatch.setitem(api.BACKENDS, "xla", own)
    attend = partial(api.attend_heads, segments=jnp.asarray(SEGMENTS), scale=0.3, backend="xla")
    for got, want in zip(slopes(attend, *operands()), exact(), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert set(counts) == {(HEADS, HEADS) if opaque else (GROUPS, GROUPS)}


def test_each_device_takes_its_own_groups() -> None:
    grid = make_mesh(jax.devices(), 2, 2)
    q, k, v, _ = (np.concatenate([x, 2 * x]) for x in operands())
    segments = np.concatenate([SEGMENTS, SEGMENTS])
    run = jax.jit(partial(api.attend_heads, scale=0.3), compiler_options=QUICK)
    want = run(q, k, v, segments)
    heads = NamedSharding(grid, PartitionSpec("data", None, "tensor"))
    rows = NamedSharding(grid, PartitionSpec("data"))
    with jax.set_mesh(grid):
        placed = [jax.device_put(x, heads) for x in (q, k, v)]
        compiled = run.lower(*placed, jax.device_put(segments, rows)).compile()
        got = compiled(*placed, jax.device_put(segments, rows))
    assert "all-gather" not in str(compiled.as_text())
    np.testing.assert_array_equal(got, want)


def pages() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pool, pages, tokens): two rows of 64 numbers a token, (value | key) of 32 each."""
    random = np.random.default_rng(1)
    tokens = random.standard_normal((2, 128, 64)).astype(np.float32)
    pool = np.full((5, 32, 128), np.nan, np.float32)
    table = np.array([[3, 1], [4, 2]], np.int32)
    pool[table] = tokens.reshape(2, 2, 32, 128)
    return pool.view(np.uint32), table, tokens


@pytest.mark.parametrize("backend", ["xla", "pallas_tpu"])
def test_queries_meet_the_last_numbers_of_what_a_token_keeps(monkeypatch, backend: str) -> None:
    """The TPU kernel, interpreted, gets zeros where the values are."""
    monkeypatch.setattr(pallas_tpu, "_elsewhere", str)
    pool, table, tokens = pages()
    ends = np.array([100, 65])
    q = np.random.default_rng(2).standard_normal((2, 1, 3, 32)).astype(np.float32)
    shape = {"value_width": 32, "scale": 0.2, "width": 64, "backend": backend}
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        run = jax.jit(partial(api.attend_pages, **shape), compiler_options=QUICK)
        out = np.asarray(run(q, pool, table, ends - 1, np.ones(2, np.int32)))
    for row, head in np.ndindex(2, 3):
        seen = np.float64(tokens[row, : ends[row]])
        shares = np.exp(seen[:, 32:] @ q[row, 0, head] * 0.2)
        want = shares @ seen[:, :32] / shares.sum()
        np.testing.assert_allclose(out[row, 0, head], want, atol=1e-5)


def test_what_cannot_be_is_named() -> None:
    q, k, v, segments = map(jnp.asarray, (*operands()[:3], SEGMENTS))
    k, v = (jnp.concatenate([x, x[:, :, :1]], 2) for x in (k, v))
    with pytest.raises(ValueError, match=r"k: shape \(1, 192, 3, 12\) must be \(1, 192, 4, 12\)"):
        api.attend_heads(q, k, v, segments, scale=0.3)
    pool, table, one = *map(jnp.asarray, pages()[:2]), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="width: 32 must be at least q's 64"):
        wide = jnp.zeros((2, 1, 3, 64))
        api.attend_pages(wide, pool, table, one, one, value_width=8, scale=1.0, width=32)
