"""Blocked attention against one float64 softmax; packing, cuts, skipped blocks, what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rl_jax.arrays import round_up
from rl_jax.kernels.mla import api, reference, spans, xla
from rl_jax.sharding import make_mesh
from tests.fakes.compiling import QUICK
from tests.trainer.sharded import collectives

H, W, V = 3, 12, 8
SCALE = 0.3
"""No power of two: scaling rounds."""
SHAPE = {"value_width": V, "scale": SCALE}
attend_rows = jax.jit(partial(xla.attend_rows, **SHAPE))
attend_heads = jax.jit(partial(xla.attend_heads, scale=SCALE))
keys_seen = jax.jit(spans.keys_seen, static_argnums=3, compiler_options=QUICK)
queries_seeing = jax.jit(spans.queries_seeing, static_argnums=3, compiler_options=QUICK)


def normal(*shape, seed=0, dtype=jnp.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(length, seed=0, size=1.0):
    """Queries, then latents for all heads."""
    q = np.float32(size) * normal(length, H, W, seed=seed)
    return q, normal(length, W, seed=seed + 100)


def per_head(length, seed=0, size=1.0):
    """Queries, then keys and values of each head."""
    k, v = normal(length, H, W, seed=seed + 100), normal(length, H, V, seed=seed + 200)
    return operands(length, seed, size)[0], k, v


KINDS = {
    "rows": (operands, attend_rows, partial(reference.attend, **SHAPE)),
    "heads": (per_head, attend_heads, partial(reference.attend_heads, scale=SCALE)),
}


def row_of(sequences, length):
    """One packed row of all operands, its segments, and where sequences start."""
    row = [np.zeros((1, length, *x.shape[1:]), np.float32) for x in sequences[0]]
    segments, starts, at = np.full((1, length), -1), [], 0
    for number, sequence in enumerate(sequences):
        n = len(sequence[0])
        for whole, part in zip(row, sequence, strict=True):
            whole[0, at : at + n] = part
        segments[0, at : at + n] = number
        starts.append(at)
        at += round_up(n, 64)
    return row, segments, starts


def alone(attend, sequence, length):
    """In a row of `length` tokens with nothing else."""
    row, segments, _ = row_of([sequence], length)
    return np.asarray(attend(*row, segments))[0, : len(sequence[0])]


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def softmaxes(attend, sequence, weights):
    out, pull = jax.vjp(attend, *sequence)
    return out, pull(weights)


def exact(attend, sequence, weights):
    """Values and gradients of a weighted sum, in float64.

    Zeros may follow: no token sees a later one, and no slope comes from where weights are zero.
    """
    with jax.enable_x64(True):
        out, grads = softmaxes(attend, [np.float64(x) for x in sequence], np.float64(weights))
        return np.asarray(out), [np.asarray(g) for g in grads]


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK)
def blocked(kind, row, segments, weights):
    """Values and gradients of a weighted sum; one program for all lengths of as many blocks."""
    out, pull = jax.vjp(lambda *x: KINDS[kind][1](*x, segments), *row)
    return out, pull(weights)


@pytest.mark.parametrize(
    ("kind", "length", "size"),
    [
        *(("rows", n, 1.0) for n in (1, 63, 64, 65)),
        *(("rows", 150, 40.0), ("heads", 65, 1.0), ("heads", 300, 40.0)),
    ],
)
def test_values_and_gradients_of_one_softmax(kind, length, size):
    """Also where scores reach hundreds, so that the running maximum matters."""
    make, _, definition = KINDS[kind]
    sequence = make(length, size=size)
    row, segments, _ = row_of([sequence], round_up(length, 64))
    weights = np.zeros((*segments.shape, H, V), np.float32)
    weights[0, :length] = np.random.default_rng(4).standard_normal((length, H, V))
    want, want_grads = exact(definition, [x[0] for x in row], weights[0])
    out, grads = jax.device_get(blocked(kind, row, segments, weights))
    np.testing.assert_allclose(out[0, :length], want[:length], atol=3e-5 if size > 1 else 2e-6)
    for got, expected in zip(grads, want_grads, strict=True):
        bound = (1e-5 if size == 1 else 2e-4) * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(got[0], expected, atol=bound)
        assert not np.any(got[0, length:])


def test_by_hand():
    """Two tokens, one head: weights 1/3 and 2/3 for scores 0 and log 2."""
    latents = np.array([[3.0, 0.0], [9.0, np.log(2.0)]], np.float32)
    q = np.array([[[0.0, 5.0]], [[0.0, 1.0]]], np.float32)
    row, segments, _ = row_of([(q, latents)], 64)
    attend = jax.jit(partial(xla.attend_rows, value_width=1, scale=1.0), compiler_options=QUICK)
    out = np.asarray(attend(*row, segments))
    np.testing.assert_allclose(out[0, :2, 0, 0], [3, 7], rtol=1e-6)
    assert not np.any(out[0, 2:])


@pytest.mark.parametrize("kind", list(KINDS))
def test_packing_changes_no_bit(kind):
    """Nor do the blocks of other segments, which are skipped where no row needs them."""
    make, attend, _ = KINDS[kind]
    sequences = [make(n, seed=n) for n in (65, 1, 100, 64)]
    row, segments, starts = row_of(sequences, 512)
    other, of_other, _ = row_of([make(448, seed=8)], 512)
    both = [np.concatenate(x) for x in zip((*row, segments), (*other, of_other), strict=True)]
    out = np.asarray(attend(*both))
    for start, sequence in zip(starts, sequences, strict=True):
        want = alone(attend, sequence, 128)
        assert np.array_equal(out[0, start : start + len(want)], want)


def test_ranges_of_blocks_by_hand():
    """Blocks of 64: segment 5 in 0 and 1, padding in 2, 3 in 3 to 5, which 1 begins inside."""
    segments = np.repeat([5, 5, -1, 3, 3, 3, 1, -1], 64)
    segments[5 * 64 + 10 : 6 * 64] = 1
    segments = segments[None]
    begin, end = jax.device_get(keys_seen(segments, segments, 0, 64))
    assert list(zip(begin[0].tolist(), end[0].tolist(), strict=True)) == [
        *((0, 1), (0, 2), (0, 0)),
        *((3, 4), (3, 5), (3, 6), (5, 7), (0, 0)),
    ]
    begin, end = jax.device_get(queries_seeing(segments, segments, 0, 128))
    assert list(zip(begin[0].tolist(), end[0].tolist(), strict=True)) == [
        *((0, 1), (0, 1), (0, 0)),
        *((1, 3), (2, 3), (2, 4), (3, 4), (0, 0)),
    ]
    of_last = segments[:, 256:], segments, 256
    begin, end = jax.device_get(keys_seen(*of_last, 64))
    assert list(zip(begin[0].tolist(), end[0].tolist(), strict=True)) == [
        (3, 5),
        (3, 6),
        (5, 7),
        (0, 0),
    ]


def test_segments_may_lie_apart_and_in_any_order():
    """What counts is equal numbers, not neighbours: 2, padding, 0, 2 again."""
    q, k, v = per_head(320)
    segments = np.repeat([2, -1, 0, 2, 2], 64)
    out = np.asarray(attend_heads(q[None], k[None], v[None], segments[None]))[0]
    for number in (0, 2):
        own = segments == number
        parts = [np.concatenate([x[own], 0 * x[~own]]) for x in (q, k, v)]
        want, _ = exact(KINDS["heads"][2], parts, np.zeros((320, H, V)))
        np.testing.assert_allclose(out[own], want[: own.sum()], atol=2e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_queries_may_be_a_later_part_of_the_keys(kind):
    """Of two rows of as many tokens as above, for which there is a program."""
    make, attend, _ = KINDS[kind]
    packs = [make(100), make(250, seed=1)], [make(400, seed=2)]
    made = [row_of(pack, 512)[:2] for pack in packs]
    row = [np.concatenate(x) for x in zip(*(x for x, _ in made), strict=True)]
    segments = np.concatenate([x for _, x in made])
    whole = np.asarray(attend(*row, segments))
    q, *keys = row
    for first in (0, 128, 320):
        part = slice(first, first + 64)
        out = attend(q[:, part], *keys, segments[:, part], first=first, key_segments=segments)
        assert np.array_equal(out, whole[:, part])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_reaches_no_earlier_output(dtype):
    given = [x.astype(dtype)[None] for x in per_head(192)]
    segments = np.zeros((1, 192), np.int32)
    before = np.asarray(attend_heads(*given, segments))
    for x in given:
        x[:, 100] += 3
    after = np.asarray(attend_heads(*given, segments))
    assert before.dtype == dtype
    assert np.array_equal(before[:, :100], after[:, :100])
    assert not np.array_equal(before[:, 100:], after[:, 100:])


@pytest.mark.parametrize(("keys", "values", "scale"), [(W, V, SCALE), (192, 128, 192**-0.5)])
def test_bfloat16_operands_add_up_in_float32(keys, values, scale):
    sizes = ((320, H, keys), (320, H, keys), (320, H, values))
    sequence = [normal(*size, seed=i, dtype=jnp.bfloat16) for i, size in enumerate(sizes)]
    weights = normal(320, H, values, seed=4, dtype=jnp.bfloat16)
    want, want_grads = exact(partial(reference.attend_heads, scale=scale), sequence, weights)
    run = partial(xla.attend_heads, scale=scale, segments=jnp.zeros((1, 320), jnp.int32))

    def both(operands, weights):
        out, pull = jax.vjp(run, *operands)
        return out, *pull(weights)

    quick = jax.jit(both, compiler_options=QUICK)
    out, *grads = jax.device_get(quick([x[None] for x in sequence], weights[None]))
    for got, expected in zip((out, *grads), (want, *want_grads), strict=True):
        distance = np.linalg.norm(np.float64(got[0]) - expected) / np.linalg.norm(expected)
        assert distance <= (5e-3 if expected is want else 8e-3)


def test_a_long_segment_costs_other_rows_no_blocks():
    """Each row has ranges of its own: what one sees does not widen another's."""
    short, long = np.arange(256) // 64, np.zeros(256, int)
    segments = np.stack([short, long, np.full(256, -1)])
    for ranges in (keys_seen, queries_seeing):
        begin, end = jax.device_get(ranges(segments, segments, 0, 64))
        assert (end - begin).sum(1).tolist() == [4, 10, 0]


@pytest.mark.parametrize("heads", [1, 4, 32])
def test_packed_segments_see_their_own_blocks_whatever_their_numbers(heads):
    """From multiples of 64 on: 7 of 3 blocks, 2 of 1, 5 of 2, then padding."""
    segments = np.repeat([7, 7, 7, 2, 5, 5, -1, -1], 64)[None]
    size = xla.block_size(heads, 512)
    begin, end = jax.device_get(keys_seen(segments, segments, 0, size))
    want = np.repeat(
        [(0, 1), (0, 2), (0, 3), (3, 4), (4, 5), (4, 6), (0, 0), (0, 0)], 64 // size, 0
    )
    assert np.array_equal(np.stack([begin[0], end[0]], 1), want)


def test_neighbours_of_a_row_change_no_bit_and_no_gradient():
    """Rows go one after the other, whatever lies beside them."""
    rows = normal(4, 256, H, W), normal(4, 256, W, seed=1)
    segments = np.arange(256) // np.array([[64], [256], [128], [100]])
    weights = normal(4, 256, H, V, seed=2)

    @jax.jit
    def both(q, latents, segments, weights):
        out, pull = jax.vjp(lambda *x: attend_rows(*x, segments), q, latents)
        return out, *pull(weights)

    together = jax.device_get(both(*rows, segments, weights))
    for r in range(4):
        alone = jax.device_get(both(*(x[r : r + 1] for x in (*rows, segments, weights))))
        assert all(np.array_equal(x[r], y[0]) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("kind", list(KINDS))
def test_on_a_mesh_a_device_takes_its_own_rows_and_heads(kind):
    """One device's numbers; gradients of shared latents are added up once, nothing is gathered."""
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")
    widths = {"rows": ((W,),), "heads": ((4, W), (4, V))}[kind]
    given = normal(2, 128, 4, W), *(normal(2, 128, *w, seed=i + 1) for i, w in enumerate(widths))
    given = *given, normal(2, 128, 4, V, seed=9), np.arange(128) // [[64], [100]]
    attend = {"rows": partial(xla.attend_rows, **SHAPE)}.get(
        kind, partial(xla.attend_heads, scale=SCALE)
    )

    def both(*given):
        *operands, weights, segments = given
        out, pull = jax.vjp(lambda *x: attend(*x, segments), *operands)
        return out, *pull(weights)

    want = jax.jit(both, compiler_options=QUICK)(*given)
    mesh = make_mesh(jax.devices(), 2, 2)
    places = [NamedSharding(mesh, heads if x.ndim == 4 else rows) for x in given]
    placed = [jax.device_put(x, place) for x, place in zip(given, places, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(*placed).compile(QUICK)
    for got, expected in zip(compiled(*placed), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)
    found = collectives(compiled)
    assert dict(found) == ({"all-reduce": 1} if kind == "rows" else {})


@pytest.mark.parametrize(("rows", "count"), [(3, 4), (2, 3)])
def test_rows_or_heads_that_do_not_divide_over_a_mesh_are_computed_whole(rows, count):
    given = normal(rows, 64, count, W), normal(rows, 64, W, seed=1), np.zeros((rows, 64), int)
    attend = jax.jit(partial(xla.attend_rows, **SHAPE), compiler_options=QUICK)
    with jax.set_mesh(make_mesh(jax.devices(), 2, 2)):
        out = attend(*given)
    assert np.array_equal(out, attend(*given))


def test_temporaries_of_the_gradients_grow_with_the_length_alone():
    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        gradients = jax.jit(jax.grad(lambda *x: attend_heads(*x).sum(), (0, 1, 2)))
        compiled = gradients.lower(x, x, x, segments).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporaries(4096), temporaries(16384)
    assert long <= 4.5 * short and long < 16384 * 16384 / 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": normal(1, 100, H, W)}, "q: 100 tokens per row must be a multiple of 64"),
        ({"q": normal(64, H, W)}, "q: needs rows, tokens, heads and width, not shape"),
        ({"k": normal(1, 128, H, W + 1)}, r"k: shape \(1, 128, 3, 13\) must be \(1, 128, 3, 12\)"),
        ({"v": normal(1, 64, H, V)}, r"v: shape \(1, 64, 3, 8\) must be \(1, 128, 3, 8\)"),
        ({"v": normal(1, 128, H, V, dtype=jnp.bfloat16)}, "v: bfloat16 must be q's float32"),
        ({"segments": jnp.zeros((1, 64), int)}, r"segments: shape \(1, 64\) must be \(1, 128\)"),
        ({"first": 64}, "first: 64 must be a multiple of 64 from 0 to 0"),
    ],
)
def test_what_it_cannot_take_is_named(change, said):
    """Not through jaxtyping, which is off outside tests."""
    given = {"q": normal(1, 128, H, W), "k": normal(1, 128, H, W), "v": normal(1, 128, H, V)}
    given = given | {"segments": np.zeros((1, 128), int), "first": 0} | change
    with pytest.raises(ValueError, match=said):
        xla.attend_heads.__wrapped__(**jax.tree.map(jnp.asarray, given), scale=1.0)


def test_a_value_width_beyond_the_latents_is_named():
    q, latents, segments = jnp.zeros((1, 64, H, W)), jnp.zeros((1, 64, W)), jnp.zeros((1, 64), int)
    with pytest.raises(ValueError, match="value_width: 13 must be between 1 and 12"):
        xla.attend_rows(q, latents, segments, value_width=13, scale=1.0)


def test_a_backend_of_heads_is_chosen_by_name_or_the_first_that_can(monkeypatch):
    broken = api.BACKENDS["xla"]._replace(heads_obstacle=lambda *asked: f"no {asked}")
    monkeypatch.setattr(api, "BACKENDS", {"chip": broken, **api.BACKENDS})
    q, k, v = (jnp.asarray(x)[None] for x in per_head(64))
    given = q, k, v, jnp.zeros((1, 64), jnp.int32)
    with pytest.raises(ValueError, match=r"backend: chip cannot run here: no \(12, 8"):
        api.attend_heads(*given, scale=SCALE, backend="chip")
    out = jax.jit(partial(api.attend_heads, scale=SCALE))(*given)
    assert np.array_equal(out, attend_heads(*given))
