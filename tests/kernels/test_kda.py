"""Chunk and recurrent KDA against the float64 recurrence, and what no bit may depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import round_up
from rl_jax.kernels.kda import reference, xla

H, K = 2, 16
NAMES = ("q", "k", "v", "g", "beta", "state")
GATES = ("mixed", "saturated", "open", "blocks")


def operands(length, *, gate="mixed", beta=None, same_keys=False, seed=0, state=False):
    """One sequence, float32 numpy, [L, H, K] each; `state` random when asked for, else zero."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    q, k, v = normal((3, length, H, K))
    if same_keys:
        k = np.broadcast_to(k[:1], k.shape) + 1e-3 * normal(k.shape)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = {
        "mixed": -5 / (1 + np.exp(2 - 3 * normal((length, H, K)))),
        "saturated": np.full((length, H, K), -5.0),
        "open": np.full((length, H, K), -1e-6),
        "blocks": np.where(np.arange(length)[:, None, None] // 15 % 2, -5.0, -1e-3)
        * np.ones((length, H, K)),
    }[gate]
    b = 1 / (1 + np.exp(-normal((length, H)))) if beta is None else np.full((length, H), beta)
    s = normal((H, K, K)) if state else np.zeros((H, K, K))
    return [x.astype(np.float32) for x in (q, k, v, g, b, s)]


def padded(parts, length=256):
    """[L, ...] -> [1, length, ...] with neutral tokens at the end; the state alone gets [1]."""
    *tokens, state = parts
    extra = length - len(tokens[0])
    tokens = [np.pad(x, ((0, extra),) + ((0, 0),) * (x.ndim - 1))[None] for x in tokens]
    return [*tokens, state[None]]


chunked = jax.jit(xla.chunked)


@jax.jit
def chunked_objective(parts, weights):
    def objective(q, k, v, g, beta, state):
        out, final = xla.chunked(q, k, v, g, beta, state)
        return jnp.sum(out * weights[0]) + jnp.sum(final * weights[1])

    return jax.grad(objective, argnums=tuple(range(6)))(*parts)


@jax.jit
def exact(parts, weights):
    """Outputs, state and six gradients of the recurrence."""

    def objective(*parts):
        out, final = reference.recurrent(*parts)
        return jnp.sum(out * weights[0]) + jnp.sum(final * weights[1]), (out, final)

    grads, out = jax.grad(objective, argnums=tuple(range(6)), has_aux=True)(*parts)
    return (*out, *grads)


def oracle(inputs, weights):
    """`exact` in float64 of padded inputs: a neutral token changes neither state nor gradient."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(x[0], jnp.float64) for x in inputs]
        return [
            np.asarray(x) for x in exact(wide, [jnp.asarray(x[0], jnp.float64) for x in weights])
        ]


def cotangents(length, seed=7):
    """Random float32 weights on `length` outputs of 256 and on the state."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((1, 256, H, K)) * (np.arange(256) < length)[:, None, None]
    return rows.astype(np.float32), rng.standard_normal((1, H, K, K)).astype(np.float32)


def assert_near(got, want, bound, what=""):
    error = np.abs(np.asarray(got, np.float64) - want).max()
    scale = max(1.0, np.abs(want).max())
    assert error <= bound * scale, f"{what}: {error:.2e} against a scale of {scale:.2e}"


def test_one_token_by_hand():
    """S = 0.5 S0; u = beta (v - S^T k); o = S^T q / sqrt 2, on numbers small enough for paper."""
    q, k = jnp.array([[[1.0, 0.0]]]), jnp.array([[[0.0, 1.0]]])
    v, g = jnp.array([[[3.0, 5.0]]]), jnp.log(jnp.array([[[0.5, 0.25]]]))
    state = jnp.array([[[2.0, 4.0], [8.0, 12.0]]])
    out, final = reference.recurrent(q, k, v, g, jnp.array([[0.5]]), state)
    # decayed: [[1, 2], [2, 3]]; u = 0.5 ([3, 5] - [2, 3]) = [0.5, 1]
    np.testing.assert_allclose(final[0], [[1, 2], [2.5, 4]], rtol=1e-6)
    np.testing.assert_allclose(out[0, 0], np.array([1, 2]) / 2**0.5, rtol=1e-6)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 200])
def test_chunks_equal_the_recurrence(length):
    inputs = padded(operands(length, state=True, seed=length))
    out, final = chunked(*inputs)
    want, want_final, *_ = oracle(inputs, cotangents(length))
    assert_near(out[0, :length], want[:length], 2e-6)
    assert_near(final[0], want_final, 2e-6)
    assert not np.any(np.isnan(out))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("keys", ["random", "same"])
def test_values_and_gradients(gate, keys):
    inputs = padded(operands(130, gate=gate, same_keys=keys == "same", state=True))
    check(inputs, cotangents(130), 1e-5, 3e-5)


def check(inputs, weights, bound, gradient_bound):
    """Values and the six gradients of the chunk form against the oracle, over the valid tokens."""
    out, final, *grads = oracle(inputs, weights)
    got_out, got_final = chunked(*inputs)
    valid = 130
    assert_near(got_out[0, :valid], out[:valid], bound, "out")
    assert_near(got_final[0], final, bound, "state")
    for name, a, b in zip(NAMES, chunked_objective(inputs, weights), grads, strict=True):
        a, b = (a[0], b) if name == "state" else (a[0, :valid], b[:valid])
        assert_near(a, b, gradient_bound, f"d{name}")


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("gate", ["mixed", "open"])
def test_betas_at_their_ends(beta, gate):
    inputs = padded(operands(130, gate=gate, beta=beta, same_keys=True, state=True))
    check(inputs, cotangents(130), 2e-5, 1e-4)


def test_gradients_stay_finite_where_gradients_are_large():
    """Saturated gates and a cotangent of 1e6: the factors of a diagonal block span exp(+-37.5)."""
    inputs = padded(operands(256, gate="saturated"))
    weights = np.full((1, 256, H, K), 1e6, np.float32), np.zeros((1, H, K, K), np.float32)
    assert all(np.all(np.isfinite(x)) for x in chunked_objective(inputs, weights))


def test_inverse_of_hard_matrices_and_its_gradient():
    """Identical keys without decay: a full triangle of ones, where powers of L reach 1e17."""
    rng = np.random.default_rng(0)
    ones = np.tril(np.ones((64, 64)), -1)
    hard = np.stack([ones, ones * rng.uniform(0.5, 1, (64, 64)), 0 * ones]).astype(np.float32)
    want = np.linalg.inv(hard.astype(np.float64) + np.eye(64))
    got = xla.unit_lower_inverse(jnp.asarray(hard))
    assert_near(got, want, 1e-6)
    cotangent = jnp.asarray(rng.standard_normal(hard.shape), jnp.float32)
    grad = jax.vjp(xla.unit_lower_inverse, jnp.asarray(hard))[1](cotangent)[0]
    turned = want.swapaxes(-1, -2)
    assert_near(grad, np.tril(-(turned @ cotangent @ turned), -1), 1e-5)


def pack(sequences, length):
    """Sequences at multiples of 64 in one row, with the chunks' reset flags and the starts."""
    parts = [padded(s, round_up(len(s[0]), 64)) for s in sequences]
    rows = [np.concatenate([p[i][0] for p in parts]) for i in range(5)]
    rows = [np.pad(x, ((0, length - len(x)),) + ((0, 0),) * (x.ndim - 1))[None] for x in rows]
    starts = np.cumsum([0] + [p[0].shape[1] for p in parts])[:-1]
    reset = np.zeros((1, length // 64), bool)
    reset[0, starts // 64] = True
    return rows, reset, starts


def test_packed_rows_equal_each_sequence_alone_bit_for_bit():
    lengths = [[65, 1, 100], [256], [17, 63, 64]]
    sequences = [[operands(n, seed=10 * i + n) for n in row] for i, row in enumerate(lengths)]
    packed = [pack(row, 320) for row in sequences]
    rows = [np.concatenate(x) for x in zip(*(p[0] for p in packed), strict=True)]
    reset = np.concatenate([p[1] for p in packed])
    garbage = np.full((3, H, K, K), 7.0, np.float32)
    out, _ = chunked(*rows, garbage, reset)
    for i, row in enumerate(sequences):
        for start, parts in zip(packed[i][2], row, strict=True):
            alone, _ = chunked(*padded(parts))
            n = len(parts[0])
            assert np.array_equal(out[i, start : start + n], alone[0, :n])


@pytest.mark.parametrize("gate", ["mixed", "saturated"])
@pytest.mark.parametrize("token", [0, 17, 31, 56, 63, 64, 100])
def test_no_output_sees_a_later_token(gate, token):
    before = padded(operands(256, gate=gate))
    after = [x.copy() for x in before]
    rng = np.random.default_rng(3)
    for x in after[:3]:
        x[0, token:] = rng.standard_normal(x[0, token:].shape) * 0.3
    after[3][0, token:] = -rng.uniform(0, 5, after[3][0, token:].shape)
    after[4][0, token:] = 0.9
    one, two = chunked(*before)[0], chunked(*after)[0]
    assert np.array_equal(one[0, :token], two[0, :token])
    assert not np.array_equal(one[0, token:], two[0, token:])


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_cuts_between_chunks_change_no_bit(cut):
    *tokens, state = padded(operands(256, state=True))
    whole, final = chunked(*tokens, state)
    first, middle = chunked(*(x[:, :cut] for x in tokens), state)
    second, last = chunked(*(x[:, cut:] for x in tokens), middle)
    assert np.array_equal(whole, np.concatenate([first, second], 1))
    assert np.array_equal(final, last)


@pytest.mark.parametrize("gate", GATES)
def test_decode_follows_the_chunks(gate):
    parts = padded(operands(192, gate=gate, state=True))
    *tokens, state = parts
    out, final = chunked(*parts)
    step = jax.jit(xla.recurrent_step)
    for t in range(192):
        got, state = step(*(x[:, t] for x in tokens), state)
        assert_near(got, np.asarray(out[:, t], np.float64), 1e-5, f"token {t}")
    assert_near(state, np.asarray(final, np.float64), 1e-5)


def test_the_gate_is_bounded_and_has_the_slope_of_its_formula():
    x = jnp.array([[[-100.0, 0.0, 1.0, 100.0]]])
    rate, bias = jnp.array([np.log(2.0)]), jnp.array([[0.0, 0.0, -1.0, 0.0]])
    g = xla.bounded_gate(x, rate, bias, -5.0)
    np.testing.assert_allclose(g[0, 0], [0, -2.5, -2.5, -5], atol=1e-6)
    slope = jax.grad(lambda x: xla.bounded_gate(x, rate, bias, -5.0).sum())(x)
    np.testing.assert_allclose(slope[0, 0], [0, -2.5, -2.5, 0], atol=1e-6)


def test_every_range_is_anchored_no_later_than_its_row():
    """Row i of the sums that build scores reads tokens up to i, or up to its pair's middle row."""
    for part, half in zip(xla.RANGES[:3], (None, 16, 32), strict=True):
        for row in range(64):
            middle = row if half is None else row // (2 * half) * (2 * half) + half
            last = np.flatnonzero(part[row]).max(initial=-1)
            assert last <= max(row, middle)
    first = xla.RANGES[0]
    assert first[::16].sum() == 0 and first[31].sum() == 15
