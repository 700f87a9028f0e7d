"""Latent attention's TPU kernels, interpreted, against one float64 softmax per sequence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rl_jax.kernels.mla import pallas_tpu, pallas_tpu_pages, reference
from tests.fakes.compiling import QUICK

INTERPRETED = pltpu.InterpretParams()
"""VMEM starts as NaN, a DMA happens where it is waited for."""


def written(ends, width, seed=0, spare_lines=8):
    """(pool, pages, latents) of rows of `ends` tokens; everything else in the pool is NaN."""
    rng = np.random.default_rng(seed)
    slots = max(-(-max(ends) // 64), 1)
    count = 1 + len(ends) * slots
    pages = rng.permutation(np.arange(1, count)).reshape(len(ends), slots).astype(np.int32)
    latents = rng.standard_normal((len(ends), slots * 64, width)).astype(np.float32)
    past = np.arange(slots * 64)[:, None] >= np.array(ends)[:, None, None]
    cached = np.where(past, np.nan, latents).reshape(len(ends), slots, width // 2, 128)
    pool = np.full((count, width // 2 + spare_lines, 128), np.nan, np.float32)
    pool[pages, : width // 2] = cached
    return pool.view(np.uint32), pages, latents


def queries(ends, n, heads, width):
    """(every token's queries, the last n of each row, positions, n_valid)."""
    rng = np.random.default_rng(7)
    length = -(-max(*ends, n) // 64) * 64
    whole = rng.standard_normal((len(ends), length, heads, width)).astype(np.float32)
    positions = np.maximum(np.array(ends) - n, 0).astype(np.int32)
    q = np.stack([row[at : at + n] for row, at in zip(whole, positions, strict=True)])
    return whole, q, positions, np.minimum(ends, n).astype(np.int32)


def attend(q, pool, pages, positions, n_valid, **shape):
    run = jax.jit(partial(pallas_tpu.attend_pages, **shape), compiler_options=QUICK)
    with pltpu.force_tpu_interpret_mode(INTERPRETED):
        return np.asarray(run(q, pool, pages, positions, n_valid).astype(jnp.float32))


def exact(whole, latents, **shape):
    """float64 outputs of every token of every row: none sees a later one."""
    latents = latents[:, : whole.shape[1]]
    attend = jax.vmap(partial(reference.attend, **shape))
    with jax.enable_x64(True):
        run = jax.jit(attend, compiler_options=QUICK)
        return np.asarray(run(np.float64(whole), np.float64(latents)))


PAGES = {
    "decode": (576, 512, 3, 1, [130, 1, 0, 64, 63]),
    "verify": (576, 512, 9, 4, [100, 2, 0]),
    "verify within a line": (64, 64, 2, 16, [100, 0, 9]),
    "prefill a page": (192, 128, 2, 64, [64, 101]),
    "prefill in tiles over parts": (128, 128, 9, 128, [700, 81]),
}


@pytest.mark.parametrize("case", PAGES)
def test_pages_against_one_softmax(case):
    width, value_width, heads, n, ends = PAGES[case]
    shape = {"value_width": value_width, "scale": width**-0.5}
    pool, pages, latents = written(ends, width)
    whole, q, positions, n_valid = queries(ends, n, heads, width)
    got = attend(q, pool, pages, positions, n_valid, **shape)
    want = exact(whole, latents, **shape)
    for row, (end, at) in enumerate(zip(ends, positions, strict=True)):
        np.testing.assert_allclose(got[row, : n_valid[row]], want[row, at:end], atol=3e-6)
        assert not np.any(got[row, n_valid[row] :])


def test_a_row_alone_has_the_bits_it_has_in_a_batch(monkeypatch):
    """Also where the page ids of the batch do not fit in one call."""
    ends = [520, 65, 0, 3]
    pool, pages, _ = written(ends, 64)
    _, q, positions, n_valid = queries(ends, 4, 2, 64)
    shape = {"value_width": 64, "scale": 0.2}
    together = attend(q, pool, pages, positions, n_valid, **shape)
    for row in range(len(ends)):
        one = slice(row, row + 1)
        alone = attend(q[one], pool, pages[one], positions[one], n_valid[one], **shape)
        assert np.array_equal(alone[0], together[row])
    monkeypatch.setattr(pallas_tpu_pages, "TABLE_LIMIT", 2 * pages.shape[1])
    assert np.array_equal(attend(q, pool, pages, positions, n_valid, **shape), together)


def test_bfloat16_queries_multiply_as_bfloat16():
    ends = [200, 30]
    pool, pages, latents = written(ends, 192)
    whole, q, positions, n_valid = queries(ends, 1, 3, 192)
    shape = {"value_width": 128, "scale": 192**-0.5}
    got = attend(jnp.asarray(q, jnp.bfloat16), pool, pages, positions, n_valid, **shape)
    every = exact(whole, latents, **shape)
    for row, end in enumerate(ends):
        want = every[row, end - 1]
        error = np.linalg.norm(got[row, 0] - want) / np.linalg.norm(want)
        assert 1e-4 < error < 5e-3


WRITES = {
    "one token": (576, 1, [0, 63, 64, 5, 127], [1, 1, 1, 0, 1]),
    "over a page's border": (576, 16, [57, 3, 47, 9], [16, 9, 0, 1]),
    "half a line each": (64, 16, [61, 3, 48], [4, 16, 16]),
    "pages": (192, 130, [64, 31, 0], [130, 97, 64]),
}


@pytest.mark.parametrize("case", WRITES)
def test_write_changes_the_tokens_words_alone(case):
    width, n, positions, n_valid = WRITES[case]
    rng = np.random.default_rng(1)
    rows, slots = len(positions), 4
    count = 1 + rows * slots
    pages = rng.permutation(np.arange(1, count)).reshape(rows, slots).astype(np.int32)
    pool = rng.integers(0, 2**32, (count, width // 2 + 8, 128), dtype=np.uint32)
    values = rng.standard_normal((rows, n, width)).astype(np.float32)
    want = pool.reshape(count, -1).copy()
    for row in range(rows):
        for token in range(n_valid[row]):
            at = positions[row] + token
            start = at % 64 * width
            words = values[row, token].view(np.uint32)
            want[pages[row, at // 64], start : start + width] = words
    scalars = np.array(positions, np.int32), np.array(n_valid, np.int32)
    with pltpu.force_tpu_interpret_mode(INTERPRETED):
        run = jax.jit(pallas_tpu.write_pages, compiler_options=QUICK)
        got = np.asarray(run(pool, pages, *scalars, values))
    assert np.array_equal(got, want.reshape(pool.shape))


def packed_heads(widths, length):
    """Rows of three segments and of one, with padding in between, after and none."""
    rng = np.random.default_rng(5)
    segments = np.full((2, length), -1, np.int32)
    segments[0, :100], segments[0, 128:129], segments[0, 192:300] = 0, 1, 2
    segments[1] = 0
    return *(rng.standard_normal((2, length, 2, w)).astype(np.float32) for w in widths), segments


def dense(q, k, v, segments, scale):
    """One softmax over all keys of a row; rows of padding are zero."""
    scores = jnp.einsum("rihd,rjhd->rhij", q, k) * scale
    seen = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]
    seen = (seen & np.tril(np.ones(seen.shape[1:], bool)))[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("rhij,rjhd->rihd", jnp.where(seen, weights, 0.0), v)


@pytest.mark.parametrize("shards", [1, 3])
def test_heads_and_their_gradients(monkeypatch, shards):
    """Blocks of 128, so that some pairs have no segment in common and are skipped.

    By the quicker of Pallas's interpreters: splash attention's DMAs are not ours to test.
    """
    kernel = pallas_tpu.splash.SplashAttentionKernel

    def interpreted(*masks, **options):
        return kernel(*masks, **options | {"interpret": True})

    monkeypatch.setattr(pallas_tpu.splash, "SplashAttentionKernel", interpreted)
    monkeypatch.setattr(pallas_tpu, "BLOCK", 128)
    q, k, v, segments = packed_heads((24, 24, 16), 320 if shards == 1 else 384)
    weights = np.random.default_rng(6).standard_normal(v.shape).astype(np.float32)

    def both(attend, *operands):
        out, pull = jax.vjp(attend, *operands)
        return out, *pull(jnp.asarray(weights, out.dtype))

    def ours(q, k, v):
        ids, length = jnp.asarray(segments), q.shape[1] // shards
        if shards == 1:
            return pallas_tpu.attend_heads(q, k, v, ids, scale=0.3)
        outs = []
        for at in range(0, q.shape[1], length):
            own = slice(at, at + length)
            options = {"scale": 0.3, "first": at, "key_segments": ids}
            outs.append(pallas_tpu.attend_heads(q[:, own], k, v, ids[:, own], **options))
        return jnp.concatenate(outs, 1)

    got = jax.jit(partial(both, ours), compiler_options=QUICK)(q, k, v)
    with jax.enable_x64(True):
        wanted = partial(both, partial(dense, segments=segments, scale=0.3))
        wanted = jax.jit(wanted, compiler_options=QUICK)
        want = [np.asarray(x) for x in wanted(*map(np.float64, (q, k, v)))]
    for result, theirs in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(result) - theirs) / np.linalg.norm(theirs)
        assert error < 2e-6
        assert not np.any(np.asarray(result)[segments < 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float32_products_keep_all_bits(dtype):
    """A TPU multiplies float32 as bfloat16 unless asked; an interpreter does not show it."""
    x = jnp.zeros((1, 128, 1, 64), dtype)
    rows, pool = jnp.zeros(1, jnp.int32), jnp.zeros((2, 32, 128), jnp.uint32)
    segments, pages = jnp.zeros((1, 128), jnp.int32), jnp.zeros((1, 2), jnp.int32)

    def loss(q, k, v):
        return jnp.sum(pallas_tpu.attend_heads(q, k, v, segments, scale=1.0), dtype=jnp.float32)

    def cached(q):
        shape = {"value_width": 64, "scale": 1.0}
        return pallas_tpu.attend_pages(q, pool, pages, rows, rows, **shape)

    for traced in (jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x), jax.make_jaxpr(cached)(x)):
        products = str(traced).count("dot_general[")
        exact = str(traced).count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert products >= 4 and exact == (products if dtype == jnp.float32 else 0)


block_masks = jax.jit(pallas_tpu._block_masks, static_argnums=3, compiler_options=QUICK)


def test_skipped_blocks_are_those_without_a_segment_in_common():
    segments = np.repeat([0, 0, 1, -1, 2, 2, 2, -1], 4).astype(np.int32)
    masks = block_masks(segments, segments, 0, 8)
    meet = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    nearest_key = [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [2, 2, 2, 3]]
    nearest_query = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3, 3]]
    for mask, nearest in zip(masks, (nearest_key, nearest_query), strict=True):
        assert mask.block_mask is not None and mask.data_next is not None
        assert np.array_equal(mask.block_mask[0], meet)
        assert np.array_equal(mask.data_next[0], nearest)


def test_blocks_of_a_shard_meet_those_of_the_whole_row():
    """Rows 2 and 3 of the table of all blocks; queries count from the shard's first."""
    segments = np.repeat([0, 0, 1, -1, 2, 2, 2, -1], 4).astype(np.int32)
    masks = block_masks(segments[16:], segments, 16, 8)
    nearest_key, nearest_query = [[2, 2, 2, 2], [2, 2, 2, 3]], [[0, 0, 0, 0], [0, 0, 1, 1]]
    for mask, nearest in zip(masks, (nearest_key, nearest_query), strict=True):
        assert mask.block_mask is not None and mask.data_next is not None
        assert np.array_equal(mask.block_mask[0], [[0, 0, 1, 0], [0, 0, 1, 1]])
        assert np.array_equal(
            mask.data_next[0] * mask.block_mask[0], np.array(nearest) * mask.block_mask[0]
        )
        assert np.array_equal(mask.q_sequence, np.arange(16, 32))
    assert masks[1].data_next is not None
    assert np.all(np.isin(masks[1].data_next, (0, 1)))


def test_what_cannot_run_is_named():
    assert "cpu, not tpu" in pallas_tpu.obstacle(576, 512, jnp.float32)
    assert "cpu, not tpu" in pallas_tpu.heads_obstacle(192, 128, jnp.float32, 64)
    pool, at = jnp.zeros((2, 320, 128), jnp.uint32), jnp.zeros(1, jnp.int32)
    pages = jnp.ones((1, 1), jnp.int32)
    for width, value_width, dtype, fault in (
        (100, 64, np.float32, "q: width 100 is not a multiple of 64"),
        (128, 129, np.float32, "q: value width 129 is not within the width 128"),
        (128, 128, np.float16, "q: dtype float16 is not float32 or bfloat16"),
    ):
        q = np.zeros((1, 1, 1, width), dtype)
        with pytest.raises(ValueError, match=fault):
            attend(q, pool, pages, at, at, value_width=value_width, scale=1.0)
    with pytest.raises(ValueError, match="values: width 100 is not a multiple of 64"):
        pallas_tpu.write_pages(pool, pages, at, at, jnp.zeros((1, 1, 100)))
    long = jax.ShapeDtypeStruct((1, 262208, 1, 64), jnp.float32)
    segments = jax.ShapeDtypeStruct(long.shape[:2], jnp.int32)
    with pytest.raises(ValueError, match="q: 262208 float32 tokens per row must be at most 262144"):
        jax.eval_shape(partial(pallas_tpu.attend_heads, scale=1.0), long, long, long, segments)
