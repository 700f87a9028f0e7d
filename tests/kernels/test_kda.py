"""Chunk and recurrent KDA against the float64 recurrence: values and gradients, by relative L2."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.kda import api, chunk, recurrent, reference, xla
from tests.kernels.kda_cases import (
    BOUNDED,
    NAMES,
    UNBOUNDED,
    Case,
    H,
    K,
    V,
    case,
    cotangents,
    distance,
    oracle,
)

NEAR = {"out": 1e-5, "final": 1e-5, **{f"d{name}": 1e-4 for name in NAMES}}
ROUNDED = {"out": 5e-3, "final": 5e-3, **{f"d{name}": 8e-3 for name in NAMES}}
CORRELATED = dict.fromkeys(NEAR, 3e-2)


@partial(jax.jit, static_argnames="bounded")
def values_and_gradients(operands, reset, weights, bounded=True):
    """Outputs, final state and six gradients of the chunk form."""
    lower_bound = -5.8 if bounded else None

    def run(*operands):
        return api.chunked(*operands, reset, lower_bound=lower_bound)

    (out, final), pull = jax.vjp(run, *operands)
    return out, final, *pull((weights[0].astype(out.dtype), weights[1]))


def errors(of: Case, bounded: bool = True, dtype=jnp.float32) -> dict[str, float]:
    """The relative L2 of each tensor against the oracle on the same rounded inputs."""
    of, weights = of.rounded(dtype), cotangents(of, dtype)
    got = values_and_gradients(of.operands, of.reset, weights, bounded)
    return dict(zip(NEAR, map(distance, got, oracle(of, weights)), strict=True))


def assert_within(errors: dict[str, float], bounds: dict[str, float]) -> None:
    assert all(errors[name] <= bound for name, bound in bounds.items()), errors


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
    assert_within(errors(case(gate=gate, beta=beta)), NEAR)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", [UNBOUNDED, "blocks"])
def test_gates_without_a_bound(gate, beta):
    assert_within(errors(case(gate=gate, beta=beta), bounded=False), NEAR)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_lengths_and_packs(length):
    packs = ((length,), (length, 0, 200, length))
    assert_within(errors(case(packs, seed=length)), NEAR)
    assert_within(errors(case(packs, gate=UNBOUNDED, seed=length), bounded=False), NEAR)


@pytest.mark.parametrize("lower_bound", [-5.8, -1e-3])
def test_bounds_at_their_ends(lower_bound):
    of = case()
    q, k, v, g, *others = of.operands
    of = Case((q, k, v, jnp.where(g < 0, lower_bound, 0.0), *others), of.reset)
    assert_within(errors(of), NEAR)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", ["mixed", "saturated", "open"])
def test_rounded_operands(gate, beta):
    assert_within(errors(case(gate=gate, beta=beta), dtype=jnp.bfloat16), ROUNDED)


@pytest.mark.parametrize("cosine", [0.9, 0.999])
def test_correlated_keys(cosine):
    """The hardest there is: reflections that never fade. It is the chunk form that loses digits."""
    of = case(gate="open", beta=2.0, cosine=cosine)
    found = errors(of)
    want, want_final, *_ = oracle(of, cotangents(of))
    # The packed second row has resets, of which the recurrent form knows nothing.
    out, final = jax.jit(recurrent.recurrent)(*(x[:1] for x in of.operands))
    alone = distance(out, want[:1]), distance(final, want_final[:1])
    print(f"cosine {cosine}: chunks {found['out']:.1e} {found['final']:.1e}, one by one {alone}")
    assert_within(found, dict.fromkeys(found, 5e-3))
    assert max(alone) <= 2e-5
    assert_within(errors(of, dtype=jnp.bfloat16), CORRELATED)


def test_gradients_stay_finite_where_gradients_are_large():
    """Saturated gates and a cotangent of 1e6: the factors of a diagonal block span exp(+-37.5)."""
    of = case(gate="saturated")
    weights = tuple(np.full_like(x, 1e6) for x in cotangents(of))
    got = values_and_gradients(of.operands, of.reset, weights)
    assert all(np.all(np.isfinite(x)) for x in got)


def test_gates_without_a_bound_may_be_as_strong_as_they_like():
    """A decay of e^-2000 inside a block: no exponent overflows, no difference of sums loses it."""
    of = case()
    q, k, v, g, *others = of.operands
    g = jnp.where((np.arange(g.shape[1]) % 7 == 3)[:, None, None] & (g < 0), -2000.0, g)
    assert_within(errors(Case((q, k, v, g, *others), of.reset), bounded=False), NEAR)


def test_inverse_of_hard_matrices_and_its_gradient():
    """Identical keys without decay: a full triangle of ones, where powers of L reach 1e17."""
    rng = np.random.default_rng(0)
    ones = np.tril(np.ones((64, 64)), -1)
    hard = np.stack([ones, ones * rng.uniform(0.5, 1, (64, 64)), 0 * ones]).astype(np.float32)
    want = np.linalg.inv(hard.astype(np.float64) + np.eye(64))
    got, pull = jax.vjp(lambda x: chunk.unit_lower_inverse(chunk.split(x)), jnp.asarray(hard))
    np.testing.assert_allclose(got, want, atol=1e-6)
    cotangent = rng.standard_normal(hard.shape).astype(np.float32)
    turned = want.swapaxes(-1, -2)
    full = np.tril(-(turned @ cotangent @ turned), -1)
    assert distance(pull(jnp.asarray(cotangent))[0], full) <= 1e-6


def test_exported_states_and_their_gradients():
    """The state after every chunk is the final state of the rows cut there, also for gradients."""
    of = case(((200,), (64, 100)), length=256)
    *tokens, state = of.operands

    def exported(state):
        return api.chunked(*tokens, state, of.reset, export=True)[2]

    def cut(state):
        ends = []
        for n in range(4):
            here = slice(64 * n, 64 * n + 64)
            state = api.chunked(*(x[:, here] for x in tokens), state, of.reset[:, n : n + 1])[1]
            ends.append(state)
        return jnp.stack(ends)

    weights = np.random.default_rng(1).standard_normal((4, 2, H, K, V)).astype(np.float32)
    got, pull = (
        jax.jit(lambda s: jax.vjp(exported, s)[0]),
        jax.jit(lambda s: jax.vjp(exported, s)[1](weights)[0]),
    )
    want, pull_cut = jax.vjp(jax.jit(cut), jnp.asarray(state))
    assert np.array_equal(got(state), want)
    assert distance(pull(state), np.asarray(pull_cut(weights)[0], np.float64)) <= 1e-6


def test_truncated_gradients_compose():
    """From initial to final state: a row cut in two halves has the whole row's slopes."""
    of = case(((256,), (256,)), length=256)
    q, k, v, g, beta, state = of.operands
    weights = tuple(map(jnp.asarray, cotangents(of)))

    @jax.jit
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


def test_decode_follows_the_chunks():
    of = case(((192,), (192,)), length=192)
    *tokens, state = of.operands
    out, final = api.chunked(*tokens, state)
    got, last = jax.jit(recurrent.recurrent)(*tokens, state)
    assert distance(got, np.asarray(out, np.float64)) <= 2e-6
    assert distance(last, np.asarray(final, np.float64)) <= 2e-6
