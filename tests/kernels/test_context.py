"""Context parallelism on virtual devices: any number of shards gives what one device gives.

Rows hold a sequence over all shards, sequences that begin at and inside shards, and shards of
nothing but padding.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.kda import context as kda_context
from rl_jax.kernels.mla import context as mla_context
from rl_jax.kernels.mla import xla as mla
from rl_jax.kernels.short_conv import context as conv_context
from rl_jax.kernels.short_conv import xla as conv
from tests.fakes.compiling import QUICK
from tests.kernels.kda_cases import case as kda_case
from tests.kernels.kda_cases import cotangents, distance

LENGTH = 8 * 64
PACKS = ((500,), (65, 0, 1, 200), (192,))
"""Across 1 to 8 shards; cut inside and at shards, one empty; the last 5 shards of 8 empty."""
ROW = P(None, "context")


def sharded(function, degree, specs, out):
    mesh = Mesh(np.asarray(jax.devices()[:degree]), ("context",))
    wrapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(wrapped)


def segments_of(packs=PACKS):
    segments = np.full((len(packs), LENGTH), -1)
    for row, lengths in enumerate(packs):
        start = 0
        for number, n in enumerate(lengths):
            segments[row, start : start + n] = number
            start += 64 * max(1, -(-n // 64))
    return segments.astype(np.int32)


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def with_gradients(function, count):
    """(outputs, gradients) of a weighted sum of the outputs, in the first `count` operands."""

    def objective(operands, weights):
        outs = function(*operands)
        return sum(jnp.sum(o * w) for o, w in zip(outs, weights, strict=True)), outs

    def both(weights, *operands):
        inexact, rest = operands[:count], operands[count:]
        of = jax.grad(lambda x: objective((*x, *rest), weights), has_aux=True)
        grads, outs = of(inexact)
        return outs, grads

    return jax.jit(both)


KDA_LENGTH = 16 * 64
KDA_PACKS = ((1000,), (65, 0, 1, 300, 448), (320,))
CASES = {
    "open": {"gate": "open", "beta": 0.3},
    "keys": {"gate": "open", "beta": 2.0, "cosine": 0.9},
    "steep": {"gate": "steep"},
}
"""Slow decays, so that what enters a shard reaches its end; the same with correlated keys; gates
without a bound."""
RESULTS = ("o", "final", "q", "k", "v", "g", "beta", "state")


@functools.cache
def kda_operands(name="open", dtype="float32"):
    of = kda_case(KDA_PACKS, length=KDA_LENGTH, **CASES[name]).rounded(dtype)
    return of, cotangents(of, getattr(jnp, dtype))


def kda_sharded(degree, lower_bound=-5.0):
    alone = functools.partial(kda.chunked, lower_bound=lower_bound)

    def local(*operands):
        return kda_context.chunked(alone, *operands, axis="context")

    return sharded(local, degree, (*(ROW,) * 5, P(), ROW), (ROW, P()))


@functools.cache
def kda_compiled(degree, lower_bound, dtype):
    """Values and gradients over `degree` shards; on one device where that is 0."""
    of, weights = kda_operands(dtype=dtype)
    alone = functools.partial(kda.chunked, lower_bound=lower_bound)
    run = kda_sharded(degree, lower_bound) if degree else alone
    return with_gradients(run, 6).lower(weights, *of.operands, of.reset).compile(QUICK)


def kda_results(run, of, weights):
    outs, grads = run(weights, *of.operands, of.reset)
    return [np.asarray(x) for x in (*outs, *grads)]


@functools.cache
def kda_alone(name="open", dtype="float32"):
    """In float32 on one device, of operands rounded to `dtype`."""
    of, weights = kda_operands(name, dtype)
    bound = None if name == "steep" else -5.0
    return kda_results(kda_compiled(0, bound, "float32"), of.rounded(jnp.float32), weights)


@pytest.mark.parametrize(
    ("degree", "name", "dtype", "values", "gradients"),
    [
        (4, "open", "float32", 1e-5, 1e-4),
        (4, "keys", "float32", 5e-3, 5e-3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, "open", "float32", 0.0, 0.0),
                (2, "open", "float32", 1e-5, 1e-4),
                (8, "open", "float32", 1e-5, 1e-4),
                (4, "open", "bfloat16", 5e-3, 8e-3),
                (4, "steep", "float32", 1e-5, 1e-4),
            )
        ),
    ],
)
def test_kda_gives_one_devices_values_and_gradients(degree, name, dtype, values, gradients):
    """Rows of 1000 tokens; row 0 has an initial state."""
    of, weights = kda_operands(name, dtype)
    run = kda_compiled(degree, None if name == "steep" else -5.0, dtype)
    for result, got, want in zip(
        RESULTS, kda_results(run, of, weights), kda_alone(name, dtype), strict=True
    ):
        assert np.linalg.norm(want), result
        limit = values if result in RESULTS[:2] else gradients
        assert distance(got, want) <= limit, (result, distance(got, want))


def with_nan_state(of):
    """Row 1 begins anew, row 2 goes on from its state."""
    state = of.operands[5].copy()
    state[1] = np.nan
    return type(of)((*of.operands[:5], state), of.reset)


def with_infinite_values(of):
    """In the first sequence of row 1, in its second chunk; the third begins anew."""
    v = of.operands[2].copy()
    v[1, 64] = np.inf
    return type(of)((*of.operands[:2], v, *of.operands[3:]), of.reset)


@pytest.mark.parametrize(("spoil", "spoiled"), [(with_nan_state, 0), (with_infinite_values, 128)])
def test_what_is_not_finite_stays_in_its_sequence(spoil, spoiled):
    """The tokens of row 1 from `spoiled` on, its final state, and the other rows are as without."""
    of, weights = kda_operands()
    got = kda_results(kda_compiled(4, -5.0, "float32"), spoil(of), weights)
    for result, x, want in zip(RESULTS, got, kda_alone(), strict=True):
        limit = 1e-5 if result in RESULTS[:2] else 1e-4
        assert distance(x[[0, 2]], want[[0, 2]]) <= limit, result
        start = spoiled if x.shape[1] == KDA_LENGTH else 0
        assert distance(x[1, start:], want[1, start:]) <= limit, result
    assert spoiled == 0 or not np.all(np.isfinite(got[0][1, :spoiled]))


def collectives(text):
    """(kind, shapes) of every collective in HLO, of a tuple all; of a pair its start."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-[a-z]+"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    return sorted((kind, re.findall(r"\w+\[[\d,]*\]", shapes)) for shapes, kind in found)


def test_collectives_are_found_in_every_form():
    text = """
      %a = f32[4,2]{1,0} all-gather(%x), dimensions={0}
      %b = (f32[2]{0}, s32[]) all-reduce(%x, %y), to_apply=%add
      ROOT %c = (f32[2]{0}, f32[8]{0:T(128)}) all-gather-start(%x), dimensions={0}
      %d = f32[8]{0} all-gather-done(%c)
      %e = ((f32[2]{0}), f32[4]{0}) reduce-scatter-start(%x)
      %f = f32[2]{0} add(%all-gather.1, %x)
    """
    assert collectives(text) == [
        ("all-gather", ["f32[2]", "f32[8]"]),
        ("all-gather", ["f32[4,2]"]),
        ("all-reduce", ["f32[2]", "s32[]"]),
        ("reduce-scatter", ["f32[2]", "f32[4]"]),
    ]


def test_kda_gathers_maps_of_the_state_once_and_no_activations():
    of, _ = kda_operands()
    rows, heads, width, values = of.operands[5].shape
    maps = heads * width * (values + width) + 1
    run = kda_sharded(4)
    forward = collectives(run.lower(*of.operands, of.reset).compile(QUICK).as_text())
    assert [kind for kind, _ in forward] == ["all-gather"]
    assert forward[0][1] in ([f"f32[4,{rows},{maps}]"], [f"f32[{4 * rows},{maps}]"])
    both = collectives(kda_compiled(4, -5.0, "float32").as_text())
    kinds = [kind for kind, _ in both]
    assert kinds.count("all-gather") == 1 and kinds.count("reduce-scatter") == 1
    assert set(kinds) <= {"all-gather", "reduce-scatter", "all-reduce"}
    tokens = np.prod(of.operands[0].shape)
    for kind, shapes in both:
        sizes = [np.prod([int(n) for n in re.findall(r"\d+", x[x.index("[") :])]) for x in shapes]
        assert sum(sizes) <= 4 * rows * maps and sum(sizes) < tokens, (kind, shapes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": lambda x: x[0]}, "q: needs rows, tokens, heads and width, not shape"),
        ({"v": lambda x: x[:, :64]}, r"v: shape \(3, 64, 2, 24\) must be \(3, 256, 2, 24\)"),
        ({"state": lambda x: x[..., :8]}, r"state: shape .* must be \(3, 2, 16, 24\)"),
        ({"state": lambda x: x.astype(jnp.bfloat16)}, "state: bfloat16 must be float32"),
        (
            dict.fromkeys(RESULTS[2:7], lambda x: x[:, :96]),
            "q: 96 tokens per row must be a multiple of 64",
        ),
        ({"reset": lambda x: x[:, :1]}, r"reset: shape \(3, 1\) must be \(3, 4\)"),
    ],
)
def test_wrong_operands_of_a_shard_are_named(wrong, message):
    """Without the test session's own check of shapes, which would speak first."""
    of, _ = kda_operands()

    def local(*operands):
        given = zip((*RESULTS[2:], "reset"), operands, strict=True)
        given = {name: wrong.get(name, lambda x: x)(x) for name, x in given}
        return kda_context.chunked.__wrapped__(kda.chunked, **given, axis="context")

    run = sharded(local, 4, (*(ROW,) * 5, P(), ROW), (ROW, P()))
    with pytest.raises(ValueError, match=message):
        run.lower(*of.operands, of.reset)


@functools.cache
def convolution_alone():
    """On one device, compiled once for packed rows and once for others."""
    return with_gradients(lambda *x: (conv.short_conv(*x),), 3)


@pytest.mark.parametrize(
    ("degree", "packed"),
    [
        *((1, True), (2, False), (8, True)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, False), (4, True), (8, False))
        ),
    ],
)
def test_the_convolution_gives_one_devices_bits(degree, packed):
    x, weight, tail = normal(3, LENGTH, 2, 3), normal(4, 2, 3, seed=1), normal(3, 3, 2, 3, seed=2)
    weights = (normal(3, LENGTH, 2, 3, seed=3),)
    segments = segments_of()
    given = (segments, np.zeros((3, 3), np.int32)) if packed else ()

    def local(x, weight, tail, *given):
        return (conv_context.short_conv(x, weight, tail, *given, axis="context"),)

    specs = (ROW, P(), P(), *((ROW, P()) if packed else ()))
    run = sharded(local, degree, specs, (ROW,))
    operands = weights, x, weight, tail, *given
    outs, grads = with_gradients(run, 3)(*operands)
    wanted, wanted_grads = convolution_alone()(*operands)
    assert np.array_equal(outs[0], wanted[0])
    for got, want in zip(grads, wanted_grads, strict=True):
        assert np.linalg.norm(want) and distance(got, want) <= 1e-6


def attention(kind):
    """(operands, function of one device, function of a shard)."""
    if kind == "rows":
        sizes = {"value_width": 8, "scale": 0.5}
        operands = normal(3, LENGTH, 2, 12), normal(3, LENGTH, 12, seed=1)
        return operands, mla.attend_rows, mla_context.attend_rows, sizes
    operands = normal(3, LENGTH, 2, 12), normal(3, LENGTH, 2, 12, seed=1)
    operands = *operands, normal(3, LENGTH, 2, 8, seed=2)
    return operands, mla.attend_heads, mla_context.attend_heads, {"scale": 0.5}


@functools.cache
def attention_alone(kind):
    operands, whole, _, sizes = attention(kind)
    weights = (normal(3, LENGTH, 2, 8, seed=3),)
    run = with_gradients(lambda *x: (whole(*x, **sizes),), len(operands))
    outs, grads = run(weights, *operands, segments_of())
    return [np.asarray(x) for x in (*outs, *grads)]


@pytest.mark.parametrize(
    ("kind", "degree"),
    [
        *(("rows", 8), ("heads", 8)),
        *(pytest.param("rows", n, marks=pytest.mark.slow) for n in (1, 2, 4)),
        pytest.param("heads", 2, marks=pytest.mark.slow),
    ],
)
def test_attention_gives_one_devices_bits(kind, degree):
    operands, _, local, sizes = attention(kind)
    segments, weights = segments_of(), (normal(3, LENGTH, 2, 8, seed=3),)

    def shard(*operands):
        return (local(*operands, axis="context", **sizes),)

    run = sharded(shard, degree, (ROW,) * (len(operands) + 1), (ROW,))
    outs, grads = with_gradients(run, len(operands))(weights, *operands, segments)
    want, *want_grads = attention_alone(kind)
    assert np.array_equal(outs[0], want)
    assert not np.any(np.asarray(outs[0])[np.asarray(segments) < 0])
    for got, expected in zip(grads, want_grads, strict=True):
        assert np.linalg.norm(expected) and distance(got, expected) <= 1e-6


@pytest.mark.parametrize("kind", ["rows", "heads"])
def test_attention_keeps_its_own_shard_and_no_gathered_row(kind):
    """What the backward pass waits for: operands, outputs and log masses."""
    operands, _, local, sizes = attention(kind)
    kept = []

    def shard(segments, *operands):
        def run(*operands):
            return local(*operands, axis="context", **sizes)

        out, pull = jax.vjp(lambda x: run(*x, segments), operands)
        kept.extend(x.shape for x in jax.tree.leaves(pull))
        return pull(out)[0][0]

    sharded(shard, 4, (ROW,) * (len(operands) + 1), ROW).lower(segments_of(), *operands)
    own = [(x.shape[0], LENGTH // 4, *x.shape[2:]) for x in (*operands, segments_of())]
    rows, length, heads = own[0][:3]
    wanted = [*own, (rows, length, heads, 8), (rows, length, heads)]
    assert sum(map(np.prod, kept)) == sum(map(np.prod, wanted))


def test_a_shard_must_hold_a_tail():
    x, weight = normal(1, 4, 2), normal(4, 2)
    run = sharded(lambda x, w: conv_context.short_conv(x, w, axis="context"), 2, (ROW, P()), ROW)
    with pytest.raises(ValueError, match="x: a shard of 2 tokens must hold the 3 inputs"):
        run(x, weight)
