"""The short convolution against its definition; tails across cuts; segments that never mix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.short_conv import reference, xla
from tests.fakes.compiling import QUICK

WEIGHT = np.float32(np.random.default_rng(1).standard_normal((4, 6)))
conv = jax.jit(xla.short_conv)


def signal(length, seed=0):
    return np.float32(np.random.default_rng(seed).standard_normal((length, 6)))


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def with_gradients(function, weights, *operands):
    """The values of `function`, and the gradients of their weighted sum in all operands."""
    out, pull = jax.vjp(function, *operands)
    return out, *pull(weights.astype(out.dtype))


def exact(function, weights, *operands):
    with jax.enable_x64(True):
        found = with_gradients(function, weights, *map(np.float64, operands))
        return [np.asarray(x) for x in found]


def test_by_hand():
    """Taps 1, 2, 3, 4 on 1, 1, 0, 2: 4, 7, 5, 11, then silu."""
    x = jnp.array([1.0, 1.0, 0.0, 2.0])[None, :, None]
    weight = jnp.array([1.0, 2.0, 3.0, 4.0])[:, None]
    want = np.array([4.0, 7.0, 5.0, 11.0])
    got = conv(x, weight)[0, :, 0]
    np.testing.assert_allclose(got, want / (1 + np.exp(-want)), rtol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 4, 12])
def test_values_and_gradients_of_the_definition(length):
    x, weights = signal(length), np.random.default_rng(2).standard_normal((length, 6))
    want, *want_grads = exact(reference.short_conv, weights, x, WEIGHT)
    out, *grads = with_gradients(xla.short_conv, weights[None], x[None], WEIGHT)
    np.testing.assert_allclose(out[0], want, atol=2e-6)
    np.testing.assert_allclose(grads[0][0], want_grads[0], atol=1e-5)
    np.testing.assert_allclose(grads[1], want_grads[1], atol=3e-5)


@pytest.mark.parametrize("cut", [1, 3, 5, 64])
def test_the_tail_carries_over_a_cut(cut):
    x = signal(100)[None]
    whole = conv(x, WEIGHT)
    tail = jnp.zeros((1, 3, 6))
    first = conv(x[:, :cut], WEIGHT, tail)
    tail = jax.jit(xla.next_tail)(x[:, :cut], tail, jnp.array([cut]))
    second = conv(x[:, cut:], WEIGHT, tail)
    np.testing.assert_allclose(whole, np.concatenate([first, second], 1), atol=1e-6)
    if cut == 64:
        assert np.array_equal(whole, np.concatenate([first, second], 1))


def test_the_tail_holds_the_last_valid_inputs():
    x, tail = signal(5)[None].repeat(4, 0), signal(3, seed=9)[None].repeat(4, 0)
    new = jax.jit(xla.next_tail)(x, tail, jnp.array([0, 1, 3, 5]))
    both = np.concatenate([tail, x], 1)
    for row, n in enumerate((0, 1, 3, 5)):
        assert np.array_equal(new[row], both[row, n : n + 3])


def test_taps_stay_inside_their_segment():
    """Two sequences side by side come out as each alone, and so do their gradients."""
    one, two = signal(64), signal(40, seed=5)
    row = np.concatenate([one, two, np.full((24, 6), 3.0, np.float32)])[None]
    segments = jnp.array([[0] * 64 + [1] * 40 + [-1] * 24])
    out = conv(row, WEIGHT, segments=segments)
    assert np.array_equal(out[0, :64], conv(one[None], WEIGHT)[0])
    assert np.array_equal(out[0, 64:104], conv(two[None], WEIGHT)[0])
    of_second = np.float32(np.asarray(segments) == 1)[..., None].repeat(6, -1)
    of_segments = partial(xla.short_conv, segments=segments)
    _, grad, _ = with_gradients(of_segments, of_second, row, WEIGHT)
    assert not np.any(grad[0, :64]) and not np.any(grad[0, 104:])
    _, alone, _ = with_gradients(xla.short_conv, np.ones((1, 40, 6)), two[None], WEIGHT)
    np.testing.assert_allclose(grad[0, 64:104], alone[0], atol=1e-6)


def test_gradients_of_tail_and_segments_in_float64():
    """A row of three segments, the first of which goes on from the tail."""
    x, tail = signal(30)[None], signal(3, seed=9)[None]
    segments = jnp.array([[0] * 2 + [1] * 14 + [2] * 14])
    before = jnp.array([[7, 0, 0]])
    weights = np.random.default_rng(2).standard_normal((30, 6))

    def apart(x, w, tail):
        first = reference.short_conv(jnp.concatenate([tail[1:], x[:2]]), w)[2:]
        rest = reference.short_conv(x[2:16], w), reference.short_conv(x[16:], w)
        return jnp.concatenate([first, *rest])

    want = exact(apart, weights, x[0], WEIGHT, tail[0])[1:]
    packed = partial(xla.short_conv, segments=segments, tail_segments=before)
    grads = with_gradients(packed, weights[None], x, WEIGHT, tail)[1:]
    for got, expected in zip((grads[0][0], grads[1], grads[2][0]), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-5)
    assert not np.any(grads[2][0, 0]) and np.all(grads[2][0, 1:])


def test_gradients_carry_over_a_cut():
    x, weights = signal(128)[None], signal(128, seed=3)[None]

    def halves(x, w):
        first = xla.short_conv(x[:, :64], w)
        second = xla.short_conv(x[:, 64:], w, x[:, 61:64])
        return jnp.concatenate([first, second], 1)

    runs = (with_gradients(run, weights, x, WEIGHT) for run in (halves, xla.short_conv))
    for got, want in zip(*runs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_only_the_inputs_are_kept_for_the_backward_pass():
    x, segments = jnp.asarray(signal(1000)[None]), jnp.zeros((1, 1000), jnp.int32)
    conv = partial(xla.short_conv, segments=segments)
    _, pull = jax.vjp(conv, x, jnp.asarray(WEIGHT))
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    assert kept <= x.nbytes + WEIGHT.nbytes + segments.nbytes


def test_bfloat16_inputs_add_up_in_float32():
    x = jnp.asarray(signal(50), jnp.bfloat16)
    want = exact(reference.short_conv, np.zeros(x.shape), x, WEIGHT)[0]
    got = conv(x[None], WEIGHT)[0]
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.float64(got) - want) <= 3e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": WEIGHT[:, :5]}, r"weight: channels \(5,\) must be x's \(6,\)"),
        ({"tail": jnp.zeros((2, 2, 6))}, r"tail: shape \(2, 2, 6\) must be \(2, 3, 6\)"),
        ({"segments": jnp.zeros((2, 7), int)}, r"segments: shape \(2, 7\) must be \(2, 8\)"),
        (
            {"tail": jnp.zeros((2, 3, 6)), "segments": jnp.zeros((2, 8), int)},
            "tail_segments: needed where tail and segments are given",
        ),
    ],
)
def test_what_it_cannot_take_is_named(change, said):
    """Not through jaxtyping, which is off outside tests."""
    given = {"x": signal(8)[None].repeat(2, 0), "weight": WEIGHT} | change
    with pytest.raises(ValueError, match=said):
        xla.short_conv.__wrapped__(**jax.tree.map(jnp.asarray, given))
