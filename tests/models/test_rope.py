"""Rotary positions: frequencies by hand, and what turning keeps."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.rope import RopeScaling, frequencies, rotate, rotation


def test_plain_and_linear_frequencies_by_hand() -> None:
    np.testing.assert_allclose(frequencies(8, 10000.0), [1.0, 0.1, 0.01, 0.001], rtol=1e-15)
    scaled = frequencies(8, 10000.0, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(scaled, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-15)


def test_llama3_frequencies_by_hand() -> None:
    """Within 2 pi x 400 positions the pairs make 400, 40, 4 and 0.4 turns. With bounds 1 and 9 the
    first two stay, the last is divided by 8, the third keeps (4 - 1) / 8 of itself."""
    scaling = RopeScaling("llama3", 8.0, 2513, low_freq_factor=1.0, high_freq_factor=9.0)
    share = (2513 * 0.01 / (2 * math.pi) - 1) / 8
    assert share == pytest.approx(3 / 8, abs=1e-4)
    want = [1.0, 0.1, 0.01 * (share + (1 - share) / 8), 0.001 / 8]
    np.testing.assert_allclose(frequencies(8, 10000.0, scaling), want, rtol=1e-14)


def test_llama3_frequencies_of_the_released_scaling() -> None:
    """Llama 3.1: head_dim 128, theta 500000, factor 8 over 8192 positions, bounds 1 and 4. Pair i
    makes 8192 / 2 pi x 500000^(-i/64) turns: above 4 up to i = 28, below 1 from i = 35 on."""
    plain = np.array([500000.0 ** (-i / 64) for i in range(64)])
    got = frequencies(128, 500000.0, RopeScaling("llama3", 8.0, 8192))
    np.testing.assert_allclose(got[:29], plain[:29], rtol=1e-14)
    np.testing.assert_allclose(got[35:], plain[35:] / 8, rtol=1e-14)
    turns = 8192 / (2 * math.pi) * plain[29:35]
    assert turns.max() < 4 and turns.min() > 1
    share = (turns - 1) / 3
    np.testing.assert_allclose(got[29:35], plain[29:35] * (share + (1 - share) / 8), rtol=1e-13)


def test_yarn_frequencies_by_hand() -> None:
    """head_dim 8, theta 10000: pair i makes 1024 / 2 pi x 10^-i turns, 32 at i = 0.7 and 1 at
    i = 2.2; between the whole pairs 0 and 3 the kept share falls by thirds."""
    scaling = RopeScaling("yarn", 4.0, 1024)
    kept = np.array([1.0, 2 / 3, 1 / 3, 0.0])
    plain = np.array([1.0, 0.1, 0.01, 0.001])
    want = plain * kept + plain / 4 * (1 - kept)
    np.testing.assert_allclose(frequencies(8, 10000.0, scaling), want, rtol=1e-14)
    assert scaling.gain == pytest.approx(1.138629436, abs=1e-9), "0.1 ln 4 + 1"
    assert RopeScaling("yarn", 4.0, 1024, attention_factor=0.7).gain == 0.7
    assert RopeScaling("linear", 4.0).gain == 1.0


def test_yarn_frequencies_between_pairs_by_hand() -> None:
    """theta 10, head_dim 2 x 8: pair i makes 32 turns at i = 8 log10(1024 / 2 pi / 32) = 5.66 and
    1 at 17.70, cut at 15; only pairs 6 and 7 lie between."""
    low = 8 * math.log10(1024 / (2 * math.pi * 32))
    kept = np.array([1.0] * 6 + [1 - (6 - low) / (15 - low), 1 - (7 - low) / (15 - low)])
    plain = 10.0 ** (-np.arange(8) / 8)
    got = frequencies(16, 10.0, RopeScaling("yarn", 4.0, 1024, whole_pairs=False))
    np.testing.assert_allclose(got, plain * kept + plain / 4 * (1 - kept), rtol=1e-13)
    assert low == pytest.approx(5.656, abs=1e-3)


def test_a_pair_is_half_a_head_apart_and_turns_by_its_angle() -> None:
    turn = rotation(jnp.array([[0, 3]]), 4, 100.0, None, jnp.float32)
    x = jnp.asarray([1.0, 0.0, 0.0, 2.0])
    out = np.asarray(rotate(jnp.broadcast_to(x, (1, 2, 1, 4)), turn))[0, :, 0]
    np.testing.assert_array_equal(out[0], x)
    want = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    np.testing.assert_allclose(out[1], want, rtol=1e-6)


def test_the_gain_multiplies_queries_and_keys() -> None:
    scaling = RopeScaling("yarn", 4.0, 64, attention_factor=1.5)
    places = jnp.arange(5)[None]
    turn = rotation(places, 8, 10000.0, scaling, jnp.float32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8)), jnp.float32)
    got = np.linalg.norm(rotate(x, turn), axis=-1)
    np.testing.assert_allclose(got, 1.5 * np.linalg.norm(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "ntk", "factor": 2.0}, "kind: 'ntk' must be one of linear, llama3, yarn"),
        ({"kind": "linear", "factor": 0.5}, "factor: 0.5 must be at least 1"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_positions: 'yarn' must have one"),
        (
            {"kind": "llama3", "factor": 2.0, "original_max_positions": 64, "low_freq_factor": 4.0},
            "low_freq_factor: 4.0 must be below high_freq_factor = 4.0",
        ),
    ],
)
def test_a_wrong_scaling_is_named(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RopeScaling(**fields)
