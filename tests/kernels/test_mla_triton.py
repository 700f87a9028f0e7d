"""Which blocks the Triton kernels of latent attention visit, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.mla import triton_launch
from tests.fakes.compiling import QUICK

key_spans = jax.jit(triton_launch.key_spans, static_argnums=3, compiler_options=QUICK)
query_spans = jax.jit(triton_launch.query_spans, static_argnums=(2, 3), compiler_options=QUICK)
ROWS = [
    [0] * 70 + [-1] * 58 + [1] * 64 + [2] * 128,
    [0] * 320,
    [-1] * 320,
    [-1] * 64 + [3] * 1 + [-1] * 63 + [4] * 150 + [-1] * 42,
    [5] * 30 + [6] * 100 + [7] * 190,
]
SEGMENTS = np.array(ROWS, np.int32)


def seen(row):
    """[query, key]: of one segment, the key no later."""
    index = np.arange(len(row))
    return (row[:, None] == row) & (row >= 0) & (index[:, None] >= index)


SHARDS = [(0, 320), (64, 128), (192, 128), (256, 64)]
"""First token and number of the queries."""


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("at", "length"), SHARDS)
def test_no_seen_key_is_skipped_and_clear_blocks_are_seen_whole(block, at, length):
    spans = key_spans(SEGMENTS[:, at : at + length], SEGMENTS, at, block)
    first, clear = (np.asarray(x) for x in spans)
    assert not np.any(first % 64) and not np.any(clear % 64)
    for r, row in enumerate(SEGMENTS):
        for n in range(first.shape[1]):
            start, end = at + n * block, min(at + (n + 1) * block, at + length)
            mask, real = seen(row)[start:end], row[start:end] >= 0
            assert not mask[:, : first[r, n]].any()
            assert mask[real, clear[r, n] : start].all()
            keys = np.flatnonzero(mask.any(0))
            none = at + (n + 1) * block
            assert first[r, n] == (keys[0] // 64 * 64 if len(keys) else none)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("at", "length"), SHARDS)
def test_no_seeing_query_is_skipped_and_clear_blocks_see_all(block, at, length):
    spans = query_spans(SEGMENTS, at, length, block)
    last, clear = (np.asarray(x) for x in spans)
    assert not np.any(last % 64) and not np.any(clear % 64)
    for r, row in enumerate(SEGMENTS):
        for n in range(last.shape[1]):
            start, end = n * block, min((n + 1) * block, len(row))
            mask = seen(row)[at : at + length, start:end]
            assert not mask[last[r, n] :].any()
            assert mask[max(end - at, 0) : clear[r, n]].all()
            queries = np.flatnonzero(seen(row)[:, start:end].any(1))
            wanted = -(-(queries[-1] + 1) // 64) * 64 - at if len(queries) else 0
            assert last[r, n] == min(max(wanted, 0), length)


def test_one_long_segment_needs_masks_on_the_diagonal_only():
    row = np.zeros((1, 256), np.int32)
    assert [x.tolist() for x in key_spans(row, row, 0, 128)] == [[[0, 0]], [[0, 0]]]
    spans = query_spans(row, 0, 256, 128)
    assert [x.tolist() for x in spans] == [[[256] * 2], [[256] * 2]]


@pytest.mark.parametrize(
    ("operands", "said"),
    [
        ((32, 300, 0.1, "float32"), "width 300"),
        ((32, 48, -1.0, "float32"), "scale"),
        ((32, 48, 0.1, "float16"), "float16"),
    ],
)
def test_refused_rows(operands, said):
    value_width, width, scale, dtype = operands
    q, v = jnp.zeros((1, 64, 1, width), dtype), jnp.zeros((1, 64, 1, value_width), dtype)
    with pytest.raises(ValueError, match=said):
        triton_launch.attend_heads(q, q, v, jnp.zeros((1, 64), jnp.int32), scale=scale)


def test_obstacles_name_what_is_missing():
    assert "gpu" in triton_launch.obstacle(576, 512, "bfloat16") or "triton" in (
        triton_launch.obstacle(576, 512, "bfloat16")
    )
