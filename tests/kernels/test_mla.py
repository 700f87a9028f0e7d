"""Blocked latent attention against one float64 softmax; packing, cuts and garbage in the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.arrays import round_up
from rl_jax.kernels.mla import reference, xla

H, W, V = 3, 12, 8
SHAPE = {"value_width": V, "scale": 0.5}
attend_rows = jax.jit(xla.attend_rows, static_argnames=("value_width", "scale"))
attend_cached = jax.jit(xla.attend_cached, static_argnames=("value_width", "scale"))


def operands(length, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((length, H, W)).astype(np.float32) * np.float32(size)
    return q, rng.standard_normal((length, W)).astype(np.float32)


def row_of(sequences, length):
    """(q, latents, segments, starts) of one packed row."""
    q, latents = np.zeros((1, length, H, W), np.float32), np.zeros((1, length, W), np.float32)
    segments, starts, at = np.full((1, length), -1), [], 0
    for number, (a, b) in enumerate(sequences):
        q[0, at : at + len(a)], latents[0, at : at + len(a)] = a, b
        segments[0, at : at + len(a)] = number
        starts.append(at)
        at += round_up(len(a), 64)
    return q, latents, segments, starts


def alone(q, latents):
    row = row_of([(q, latents)], round_up(len(q), 64))
    return np.asarray(attend_rows(*row[:3], **SHAPE))[0, : len(q)]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_values_and_gradients_of_one_softmax(length, size):
    """Also where scores reach hundreds, so that the running maximum matters."""
    q, latents = operands(length, size=size)
    weights = np.random.default_rng(4).standard_normal((length, H, V))
    with jax.enable_x64(True):
        wide = jnp.asarray(q, jnp.float64), jnp.asarray(latents, jnp.float64)
        want = np.asarray(reference.attend(*wide, **SHAPE))

        def exact(q, c):
            return jnp.sum(reference.attend(q, c, **SHAPE) * weights)

        want_grads = [np.asarray(g) for g in jax.grad(exact, (0, 1))(*wide)]
    row = row_of([(q, latents)], round_up(length, 64))

    def blocked(q, c):
        out = xla.attend_rows(q, c, jnp.asarray(row[2]), **SHAPE)[0, :length]
        return jnp.sum(out * weights)

    grads = jax.jit(jax.grad(blocked, (0, 1)))(*(jnp.asarray(x) for x in row[:2]))
    np.testing.assert_allclose(alone(q, latents), want, atol=3e-5 if size > 1 else 2e-6)
    for got, expected in zip(grads, want_grads, strict=True):
        bound = (1e-5 if size == 1 else 2e-4) * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(got[0, :length], expected, atol=bound)
        assert not np.any(got[0, length:])


def test_by_hand():
    """Two tokens, one head: weights 1/3 and 2/3 for scores 0 and log 2."""
    latents = np.array([[3.0, 0.0], [9.0, np.log(2.0)]], np.float32)
    q = np.array([[[0.0, 5.0]], [[0.0, 1.0]]], np.float32)
    row = np.zeros((1, 64, 1, 2), np.float32), np.zeros((1, 64, 2), np.float32)
    row[0][0, :2], row[1][0, :2] = q, latents
    segments = np.where(np.arange(64) < 2, 0, -1)[None]
    out = attend_rows(*row, segments, value_width=1, scale=1.0)
    np.testing.assert_allclose(out[0, :2, 0, 0], [3, 7], rtol=1e-6)
    assert not np.any(out[0, 2:])


def test_packing_changes_no_bit():
    sequences = [operands(n, seed=n) for n in (65, 1, 100)]
    q, latents, segments, starts = row_of(sequences, 384)
    other = row_of([operands(384, seed=8)], 384)
    rows = [np.concatenate(x) for x in zip((q, latents, segments), other[:3], strict=True)]
    out = attend_rows(*rows, **SHAPE)
    for start, (a, b) in zip(starts, sequences, strict=True):
        assert np.array_equal(out[0, start : start + len(a)], alone(a, b))


@pytest.mark.parametrize("step", [64, 128, 192])
def test_prefill_at_chunk_borders_equals_training_bit_for_bit(step):
    q, latents = operands(192)
    whole = alone(q, latents)
    cache = np.full((2, 256, W), np.nan, np.float32)
    for start in range(0, 192, step):
        n = min(step, 192 - start)
        cache[0, start : start + n] = latents[start : start + n]
        queries = np.zeros((2, step, H, W), np.float32)
        queries[0, :n] = q[start : start + n]
        out = attend_cached(queries, cache, np.array([start, 0]), np.array([n, 0]), **SHAPE)
        assert np.array_equal(out[0, :n], whole[start : start + n])
        assert not np.any(out[1])


def test_decode_reads_only_what_was_written():
    q, latents = operands(100)
    whole = alone(q, latents)
    cache = np.full((3, 128, W), np.nan, np.float32)
    cache[:, :100] = latents
    positions = np.array([99, 40, 0])
    cache[1, 41:], cache[2, 1:] = np.nan, np.inf
    out = attend_cached(q[positions][:, None], cache, positions, np.ones(3, int), **SHAPE)
    np.testing.assert_allclose(out[:, 0], whole[positions], atol=2e-6)
    assert np.all(np.isfinite(out))
