"""Chunk and recurrent KDA against the float64 recurrence: values and gradients, by relative L2."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.kda import api, chunk, recurrent, reference, xla
from tests.bench.kda import gradients
from tests.fakes.compiling import QUICK
from tests.kernels.kda_cases import (
    BOUNDED,
    CORRELATED,
    NEAR,
    ROUNDED,
    UNBOUNDED,
    Case,
    H,
    K,
    V,
    assert_within,
    case,
    cotangents,
    distance,
    errors,
    oracle,
    values_and_gradients,
)


@partial(jax.jit, static_argnames="bounded", compiler_options=QUICK)
def chunks(operands, reset, weights, bounded=True):
    """Outputs, final state and six gradients of the chunk form."""
    run = partial(api.chunked, reset=reset, lower_bound=-5.8 if bounded else None)
    return values_and_gradients(run, operands, weights)


unbounded = partial(chunks, bounded=False)
SHORT = 5 * 64
short = partial(case, ((300,), (65, 0, 1, 64)), length=SHORT)
"""Gates without a bound take longer; their groups are of two chunks, the last with one added."""


def test_one_token_by_hand():
    """S = 0.5 S0; u = beta (v - S^T k); o = S^T q / sqrt 2, on numbers small enough for paper."""
    q, k = jnp.array([[[1.0, 0.0]]]), jnp.array([[[0.0, 1.0]]])
    v, g = jnp.array([[[3.0, 5.0]]]), jnp.log(jnp.array([[[0.5, 0.25]]]))
    state = jnp.array([[[2.0, 4.0], [8.0, 12.0]]])
    out, final = reference.recurrent(q, k, v, g, jnp.array([[0.5]]), state)
    # decayed: [[1, 2], [2, 3]]; u = 0.5 ([3, 5] - [2, 3]) = [0.5, 1]
    np.testing.assert_allclose(final[0], [[1, 2], [2.5, 4]], rtol=1e-6)
    np.testing.assert_allclose(out[0, 0], np.array([1, 2]) / 2**0.5, rtol=1e-6)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", BOUNDED)
def test_bounded_gates(gate, beta):
    assert_within(errors(chunks, case(gate=gate, beta=beta)), NEAR)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", [UNBOUNDED, "blocks"])
def test_gates_without_a_bound(gate, beta):
    assert_within(errors(unbounded, short(gate=gate, beta=beta)), NEAR)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_lengths_and_packs(length):
    assert_within(errors(chunks, case(((length,), (length, 0, 200, length)), seed=length)), NEAR)
    of = case(((length,), (length, 0, length)), gate=UNBOUNDED, seed=length, length=SHORT)
    assert_within(errors(unbounded, of), NEAR)


@pytest.mark.parametrize("lower_bound", [-5.8, -1e-3])
def test_bounds_at_their_ends(lower_bound):
    of = case()
    q, k, v, g, *others = of.operands
    of = Case((q, k, v, np.where(g < 0, np.float32(lower_bound), g), *others), of.reset)
    assert_within(errors(chunks, of), NEAR)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", ["mixed", "saturated", "open"])
def test_rounded_operands(gate, beta):
    assert_within(errors(chunks, case(gate=gate, beta=beta), dtype=jnp.bfloat16), ROUNDED)


def test_rounded_operands_with_gates_without_a_bound():
    of = short(gate=UNBOUNDED, beta=2.0)
    assert_within(errors(unbounded, of, dtype=jnp.bfloat16), ROUNDED)


def test_float64_is_computed_in_float64():
    of = short()
    weights = cotangents(of)
    with jax.enable_x64(True):
        wide = [np.float64(x) for x in (*of.operands, *weights)]
        got = chunks(wide[:6], of.reset, wide[6:])
    for one, want in zip(got, oracle(of, weights), strict=True):
        assert one.dtype == jnp.float64
        assert distance(one, want) <= 1e-14


@pytest.mark.parametrize("cosine", [0.9, 0.999])
def test_correlated_keys(cosine):
    """The hardest there is: reflections that never fade. It is the chunk form that loses digits."""
    of = case(gate="open", beta=2.0, cosine=cosine)
    found = errors(chunks, of)
    want, want_final, *_ = oracle(of, cotangents(of))
    # The packed second row has resets, of which the recurrent form knows nothing.
    out, final = jax.jit(recurrent.recurrent)(*(x[:1] for x in of.operands))
    alone = distance(out, want[:1]), distance(final, want_final[:1])
    print(f"cosine {cosine}: chunks {found['out']:.1e} {found['final']:.1e}, one by one {alone}")
    assert_within(found, dict.fromkeys(found, 5e-3))
    assert max(alone) <= 2e-5
    assert_within(errors(chunks, of, dtype=jnp.bfloat16), CORRELATED)


def test_gradients_stay_finite_where_gradients_are_large():
    """Saturated gates and a cotangent of 1e6: the factors of a diagonal block span exp(+-37.5)."""
    of = case(gate="saturated")
    weights = tuple(np.full_like(x, 1e6) for x in cotangents(of))
    got = chunks(of.operands, of.reset, weights)
    assert all(np.all(np.isfinite(x)) for x in got)


def test_gates_without_a_bound_may_be_as_strong_as_they_like():
    """A decay of e^-2000 inside a block: no exponent overflows, no difference of sums loses it."""
    of = short()
    q, k, v, g, *others = of.operands
    g[(np.arange(g.shape[1]) % 7 == 3)[:, None, None] & (g < 0)] = -2000.0
    assert_within(errors(unbounded, Case((q, k, v, g, *others), of.reset)), NEAR)


def test_hard_matrices_and_the_slopes_of_a_solve():
    """Identical keys without decay: a full triangle of ones, where powers of L reach 1e17."""
    rng = np.random.default_rng(0)
    ones = np.tril(np.ones((64, 64)), -1)
    hard = np.stack([ones, ones * rng.uniform(0.5, 1, (64, 64)), 0 * ones]).astype(np.float32)
    a, b = (rng.standard_normal((3, 64, n)).astype(np.float32) for n in (5, 8))

    @partial(jax.jit, compiler_options=QUICK)
    def solved(hard, a, b, *cotangents):
        lower = chunk.split(hard)
        inverse = chunk.unit_lower_inverse(lower)
        solutions, pull = jax.vjp(partial(chunk.solve, inverse), lower, a, b)
        d_lower, d_a, d_b = pull(cotangents)
        return inverse, *solutions, chunk.assemble(d_lower), d_a, d_b

    inverse = np.linalg.inv(hard.astype(np.float64) + np.eye(64))
    back = inverse.swapaxes(-1, -2)
    x, y = inverse @ a, inverse @ b
    slope = np.tril(-(back @ a @ x.swapaxes(-1, -2) + back @ b @ y.swapaxes(-1, -2)), -1)
    wanted = (inverse, x, y, slope, back @ a, back @ b)
    for got, want in zip(solved(hard, a, b, a, b), wanted, strict=True):
        assert distance(got, want) <= 1e-6


def test_exported_states_and_their_gradients():
    """The state after every chunk is the final state of the rows cut there, also for gradients."""
    of = case(((200,), (64, 100)), length=256)
    *tokens, state, reset = map(jnp.asarray, (*of.operands, of.reset))

    def exported(state):
        return api.chunked(*tokens, state, reset, export=True)[2]

    def cut(state):
        ends = []
        for n in range(4):
            here = slice(64 * n, 64 * n + 64)
            state = api.chunked(*(x[:, here] for x in tokens), state, reset[:, n : n + 1])[1]
            ends.append(state)
        return jnp.stack(ends)

    weights = np.random.default_rng(1).standard_normal((4, 2, H, K, V)).astype(np.float32)

    def with_slope(function):
        values, pull = jax.vjp(function, state)
        return values, pull(weights)[0]

    runs = (jax.jit(partial(with_slope, run), compiler_options=QUICK) for run in (exported, cut))
    (got, slope), (want, wanted) = (run() for run in runs)
    assert np.array_equal(got, want)
    assert distance(slope, np.asarray(wanted, np.float64)) <= 1e-6


def test_truncated_gradients_compose():
    """From initial to final state: a row cut in two halves has the whole row's slopes."""
    of = case(((SHORT,), (SHORT,)), length=SHORT)
    q, k, v, g, beta, state = of.operands
    weights = tuple(map(jnp.asarray, cotangents(of)))

    @partial(jax.jit, compiler_options=QUICK)
    def halves(q, k, v, g, beta, state):
        first = [x[:, :128] for x in (q, k, v, g, beta)]
        second = [x[:, 128:] for x in (q, k, v, g, beta)]
        (_, middle), pull_first = jax.vjp(api.chunked, *first, state)
        _, pull = jax.vjp(api.chunked, *second, middle)
        *later, d_middle = pull((weights[0][:, 128:], weights[1]))
        *earlier, d_state = pull_first((weights[0][:, :128], d_middle))
        return *(jnp.concatenate(x, 1) for x in zip(earlier, later, strict=True)), d_state

    exact = oracle(of, weights)[2:]
    for got, want in zip(halves(q, k, v, g, beta, state), exact, strict=True):
        assert distance(got, want) <= 1e-5


@pytest.mark.parametrize(
    ("chunks", "heads", "bounded", "size"),
    [(128, 4, True, 16), (17, 4, True, 9), (3, 1, True, 3), (5, 100, True, 1), (4, 1, False, 4)],
)
def test_groups_are_equal_and_bounded(chunks, heads, bounded, size):
    assert xla.group_size(chunks, heads, bounded) == size


def temporaries(forward: Callable, tokens: int) -> int:
    """Bytes for values and gradients of one row of H4 K64, as the compiler plans them."""
    key, beta, state = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((1, tokens, 4, 64), (1, tokens, 4), (1, 4, 64, 64))
    )
    lowered = jax.jit(gradients(forward)).lower(key, key, key, key, beta, state)
    as_planned = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}
    return lowered.compile(as_planned).memory_analysis().temp_size_in_bytes


def test_memory_is_a_part_of_a_scans_and_flat():
    """Both grow with the length, a scan's 50 times as fast; a group's own do not at all."""
    scan = temporaries(jax.vmap(reference.recurrent), 65536)
    assert 40 * temporaries(api.chunked, 65536) <= scan


def test_decode_follows_the_chunks():
    of = case(((192,), (192,)), length=192)
    *tokens, state = of.operands
    out, final = jax.jit(api.chunked, compiler_options=QUICK)(*tokens, state)
    got, last = jax.jit(recurrent.recurrent)(*tokens, state)
    assert distance(got, np.asarray(out, np.float64)) <= 2e-6
    assert distance(last, np.asarray(final, np.float64)) <= 2e-6
