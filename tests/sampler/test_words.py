"""Inputs and outputs of a step as words: what goes in comes out, bit for bit."""

import jax
import numpy as np

from rl_jax.sampler.layout import Pages
from rl_jax.sampler.programs import Words, sampled_of
from rl_jax.sampler.step import StepInputs
from rl_jax.sampler.words import pack, pack_columns, unpack

INPUTS = StepInputs(
    tokens=np.array([[1, 2, 3], [4, 5, -6]], np.int32),
    n_valid=np.array([3, 0], np.int32),
    positions=np.array([7, 2**31 - 1], np.int32),
    pages=Pages(np.arange(8, dtype=np.int32).reshape(2, 2, 2), np.zeros((2, 0), np.int32)),
    streams=np.array([[2**32 - 1, 0], [0x7FC00123, 5]], np.uint32),
    temperature=np.array([1.0, np.float32(0.1)], np.float32),
)


def test_a_row_lies_together() -> None:
    words = pack(INPUTS)
    assert words.dtype == np.uint32
    assert words[0, :9].tolist() == [1, 2, 3, 3, 7, 0, 1, 2, 3]
    assert words[1, 9:].tolist() == [0x7FC00123, 5, 0x3DCCCCCD]


def test_a_device_finds_what_the_host_packed() -> None:
    found = jax.jit(lambda words: unpack(words, INPUTS))(pack(INPUTS))
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(INPUTS), strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)


def test_a_host_finds_what_a_device_sampled() -> None:
    tokens, finite = np.array([5, 511], np.int32), np.array([True, False])
    logprobs, raw = np.array([-0.5, np.nan], np.float32), np.array([-1e-30, -np.inf], np.float32)
    words = Words(jax.jit(pack_columns)((tokens, logprobs, raw, finite)), None)
    got = [np.asarray(x) for x in sampled_of(words)[:4]]
    for own, want in zip(got, (tokens, logprobs, raw, finite), strict=True):
        assert own.dtype == want.dtype and own.tobytes() == want.tobytes()
