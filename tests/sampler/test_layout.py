"""The pool: sizes by hand, and bits that arrive where they should and nowhere else."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from rl_jax.kernels.kda.recurrent import recurrent
from rl_jax.kernels.pages import NULL_PAGE
from rl_jax.model import CacheIO, CacheSpec, StateCache, TokenCache
from rl_jax.sampler.cache import cache_io
from rl_jax.sampler.layout import (
    Layout,
    Pages,
    clear_pages,
    head_lines,
    make_layout,
    make_pool,
    pool_sharding,
)
from rl_jax.sampler.page_table import PageRow, PageTable, table_of
from tests.fakes import tiny

# Heads of 2 + 2 lines (16 * 16 and 3 * 48 words) and of 1 + 1 (4 * 6 and 2 * 8): 8 lines each.
SPEC = CacheSpec(
    (TokenCache(6), TokenCache(40)),
    (StateCache(4, (16, 16), (3, 48)), StateCache(8, (4, 6), (2, 8))),
)
MESHES = [(1, 1), (2, 2)]
ROWS = 4


def layout(data: int = 1, tensor: int = 1) -> Layout:
    return make_layout(SPEC, data=data, tensor=tensor, sequences=ROWS, max_context=128)


# --- sizes ---------------------------------------------------------------------------------------


def test_sizes_by_hand() -> None:
    made = layout(data=2, tensor=2)
    assert [head_lines(c) for c in SPEC.states] == [8, 8]
    assert made.lines == 24, "64 tokens of the wider latent take 20 lines"
    # Three heads fit: both of 2 heads a rank, two of 4.
    assert made.heads_per_page == (2, 2)
    assert [made.state_pages(i) for i in (0, 1)] == [1, 2]
    assert made.token_pages == 2
    assert made.pages_per_sequence == 1 + 2 + 2 * 2
    assert made.pages == 1 + 2 * 7, "the null page and two sequences a shard"
    assert made.shape == (2, 2, 15, 24, 128)
    assert made.bytes == 2 * 2 * 15 * 24 * 128 * 4
    assert layout().pages == 1 + 4 * (2 + 4 + 4)


def test_two_released_heads_fill_a_page_of_64_latents() -> None:
    """The sizes of a released policy: 128 + 9 lines in 144, twice in the 288 of 64 x 576 words."""
    spec = CacheSpec((TokenCache(576),), (StateCache(32, (128, 128), (3, 384)),))
    made = make_layout(spec, data=1, tensor=1, sequences=1, max_context=64)
    assert head_lines(spec.states[0]) == 144
    assert (made.lines, made.heads_per_page) == (288, (2,))


def test_a_page_is_as_large_as_the_largest_head() -> None:
    spec = CacheSpec((TokenCache(4),), (StateCache(2, (16, 64), (3, 80)),))
    made = make_layout(spec, data=1, tensor=1, sequences=1, max_context=64)
    assert (made.lines, made.heads_per_page) == (16, (1,)), "8 + 2 lines"


@pytest.mark.parametrize(("heads", "width", "expected"), [(6, 48, 3), (6, 64, 3), (5, 64, 1)])
def test_heads_per_page_divides_the_heads(heads: int, width: int, expected: int) -> None:
    """Pages of 24 and 32 lines hold 3 and 4 heads of 8, of which 6 heads take 3."""
    spec = CacheSpec((TokenCache(width),), (StateCache(heads, (16, 16), (3, 48)),))
    made = make_layout(spec, data=1, tensor=1, sequences=1, max_context=64)
    assert made.heads_per_page == (expected,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_context": 100}, "max_context must be a multiple of 64, got 100"),
        ({"sequences": 3, "data": 2}, "3 sequences do not divide over data = 2"),
        ({"tensor": 3}, "4 heads do not divide over tensor = 3"),
    ],
)
def test_what_does_not_divide_is_refused(change: dict[str, int], said: str) -> None:
    sizes = {"data": 1, "tensor": 1, "sequences": 4, "max_context": 128} | change
    with pytest.raises(ValueError, match=said):
        make_layout(SPEC, **sizes)


def test_kv_heads_have_pages_of_their_own() -> None:
    """Per rank of two: 3 of the first layer's 6 KV heads and the second's single one."""
    spec = CacheSpec((TokenCache(32, heads=6), TokenCache(6)), ())
    made = make_layout(spec, data=1, tensor=2, sequences=5, max_context=128)
    assert [made.token_heads(i) for i in (0, 1)] == [3, 1]
    assert made.pages_per_sequence == 2 * (3 + 1)
    assert made.shape == (1, 2, 1 + 5 * 8, 16, 128), "64 x 32 words are 16 lines"
    with pytest.raises(ValueError, match="6 KV heads do not divide over tensor = 4"):
        make_layout(spec, data=1, tensor=4, sequences=5, max_context=128)


# --- bits ----------------------------------------------------------------------------------------


class Setup:
    """A pool of random bits, many of them NaN patterns, and four sequences that own their pages."""

    def __init__(self, data: int, tensor: int) -> None:
        self.layout, self.mesh = layout(data, tensor), tiny.mesh(data, tensor)
        self.random = np.random.default_rng(0)
        self.bits = patterns(self.random, self.layout.shape)
        self.pool = jax.device_put(self.bits, pool_sharding(self.mesh))
        table = PageTable(self.layout)
        self.rows: list[PageRow] = []
        for number in range(ROWS):
            row = table.open(number * data // ROWS)
            assert row is not None
            table.grow(row, 128)
            self.rows.append(row)
        self.pages = table_of([*self.rows], self.layout)

    def changed(self) -> set[tuple[int, int]]:
        """(shard, page) of the pages that differ from before."""
        now = np.asarray(self.pool)
        differ = (now != self.bits).any(axis=(1, 3, 4))
        self.bits = now
        return {(int(shard), int(page)) for shard, page in np.argwhere(differ)}

    def pages_of_state(self, index: int, layer: int) -> set[tuple[int, int]]:
        """(shard, page) of the states of one layer of a sequence."""
        counts = [self.layout.state_pages(i) for i in range(layer + 1)]
        mine = self.rows[index].states[sum(counts[:-1]) : sum(counts)]
        return {(self.rows[index].shard, int(page)) for page in mine}


def patterns(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """uint32; every third is a quiet or a signalling NaN with a payload."""
    words = random.integers(0, 2**32, shape, np.uint32)
    nan = np.uint32(0x7F800001) | (words & np.uint32(0x807FFFFF))
    return np.where(random.integers(0, 3, shape) == 0, nan, words)


def floats(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return patterns(random, shape).view(np.float32)


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@cache
def io(data: int, tensor: int) -> CacheIO:
    made = cache_io(layout(data, tensor), tiny.mesh(data, tensor))
    static = {"attend": (2, 6, 7)}
    return CacheIO(
        *(
            jax.jit(function, static_argnums=static.get(name, (2,)))
            for name, function in made._asdict().items()
        )
    )


@pytest.fixture(params=MESHES, ids=["1 device", "data 2 x tensor 2"])
def place(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


def test_tokens_come_back_bit_for_bit(place: tuple[int, int]) -> None:
    setup, own = Setup(*place), io(*place)
    logs = {layer: np.zeros((ROWS, 128, SPEC.tokens[layer].width), np.float32) for layer in (0, 1)}
    written = {layer: np.zeros(ROWS, np.int32) for layer in (0, 1)}
    # Decode, then chunks; each row at its own position, some rows idle, some cut by n_valid.
    for layer, width, counts in (
        (0, 9, [9, 4, 0, 7]),
        (1, 9, [1, 9, 9, 0]),
        (0, 64, [50, 60, 64, 0]),
        (1, 64, [63, 55, 0, 64]),
        (0, 1, [1, 0, 1, 1]),
        (0, 64, [60, 64, 50, 2]),
    ):
        n_valid, positions = np.array(counts, np.int32), written[layer].copy()
        values = floats(setup.random, (ROWS, width, SPEC.tokens[layer].width))
        new = values[:, :, None]
        setup.pool = own.write_tokens(setup.pool, setup.pages, layer, positions, n_valid, new)
        expected = {(row.shard, NULL_PAGE) for row in setup.rows}
        for index, (at, n) in enumerate(zip(positions, counts, strict=True)):
            logs[layer][index, at : at + n] = values[index, :n]
            touched = range(at // 64, -(-(at + n) // 64)) if n else []
            row = setup.rows[index]
            expected |= {(row.shard, int(row.tokens[layer, page])) for page in touched}
        written[layer] += n_valid
        assert setup.changed() <= expected
    bits = np.asarray(setup.pool)
    for layer, index in np.ndindex(2, ROWS):
        row, width, n = setup.rows[index], SPEC.tokens[layer].width, written[layer][index]
        for rank in range(place[1]):
            held = bits[row.shard, rank, row.tokens[layer]].reshape(2, -1)[:, : 64 * width]
            assert same_bits(held.reshape(-1, width)[:n], logs[layer][index, :n])


@pytest.mark.parametrize("kind", ["state", "tail"])
def test_states_and_tails_come_back_bit_for_bit(place: tuple[int, int], kind: str) -> None:
    setup, own = Setup(*place), io(*place)
    read, write = getattr(own, f"read_{kind}"), getattr(own, f"write_{kind}")
    other = own.read_tail if kind == "state" else own.read_state
    for layer, cache_ in enumerate(SPEC.states):
        value = floats(setup.random, (ROWS, cache_.heads, *getattr(cache_, kind)))
        before, beside = read(setup.pool, setup.pages, layer), other(setup.pool, setup.pages, layer)
        n_valid = np.array([1, 0, 64, 2], np.int32)
        setup.pool = write(setup.pool, setup.pages, layer, n_valid, value)
        expected = {(setup.rows[1].shard, NULL_PAGE)}  # where the idle row's goes
        for index in (0, 2, 3):
            expected |= setup.pages_of_state(index, layer)
        assert setup.changed() == expected
        assert same_bits(other(setup.pool, setup.pages, layer), beside)
        after = np.asarray(read(setup.pool, setup.pages, layer))
        for index in range(ROWS):
            kept = np.asarray(before) if index == 1 else value
            assert same_bits(after[index], kept[index])


def operands(random: np.random.Generator, heads: int, key: int, value: int) -> list[np.ndarray]:
    """q, k, v, g, beta of 3 tokens a row."""
    shape = ROWS, 3, heads
    q, k = random.standard_normal((2, *shape, key)) / key**0.5
    v, g = random.standard_normal((*shape, value)), -random.random((*shape, key))
    return [x.astype(np.float32) for x in (q, k, v, g, random.random(shape))]


def test_states_advance_in_place_each_head_by_its_own_operands(place: tuple[int, int]) -> None:
    """The idle row keeps its state, a row at position 0 starts from zeros and not from NaN."""
    setup, own = Setup(*place), io(*place)
    for layer, cache_ in enumerate(SPEC.states):
        state = setup.random.standard_normal((ROWS, cache_.heads, *cache_.state))
        ones, state[3] = np.ones(ROWS, np.int32), np.nan
        pool = own.write_state(setup.pool, setup.pages, layer, ones, np.float32(state))
        given = operands(setup.random, cache_.heads, *cache_.state)
        for x in given:
            x[2, 2:] = 0
        state[3], setup.bits = 0, np.asarray(pool)
        positions, n_valid = np.array([9, 9, 1, 0]), np.array([3, 0, 2, 3])
        tails = own.read_tail(pool, setup.pages, layer)
        out, setup.pool = own.advance(pool, setup.pages, layer, positions, n_valid, tuple(given))
        want_out, want = jax.jit(recurrent)(*given, np.float32(state))
        after = own.read_state(setup.pool, setup.pages, layer)
        for index, n in enumerate(n_valid):
            expected = want if n else state
            np.testing.assert_allclose(after[index], expected[index], atol=1e-6)
            np.testing.assert_allclose(out[index, :n], want_out[index, :n], atol=1e-6)
        mine = set.union(*(setup.pages_of_state(index, layer) for index in (0, 2, 3)))
        assert mine <= setup.changed() <= mine | {(row.shard, NULL_PAGE) for row in setup.rows}
        assert same_bits(own.read_tail(setup.pool, setup.pages, layer), tails)


def test_attention_sees_its_own_tokens_with_its_own_heads(place: tuple[int, int]) -> None:
    """Row i's tokens all hold i, so whatever the scores, its heads say i; each head is scaled by
    what its query asks for: the last number of head h's values is the newest token's."""
    setup, own = Setup(*place), io(*place)
    values = np.zeros((ROWS, 128, 40), np.float32)
    values[..., 0] = np.arange(ROWS)[:, None]
    values[..., 1] = np.arange(128)
    values[..., 39] = np.arange(128)
    n_valid = np.array([128, 65, 64, 3], np.int32)
    zeros = np.zeros(ROWS, np.int32)
    pool = own.write_tokens(setup.pool, setup.pages, 1, zeros, n_valid, values[:, :, None])
    q = np.zeros((ROWS, 1, 8, 40), np.float32)
    q[:, 0, ::2, 39], q[:, 0, 1::2, 39] = 100.0, -100.0  # the newest token; the oldest
    ones = np.ones(ROWS, np.int32)
    out = np.asarray(own.attend(pool, setup.pages, 1, q, n_valid - 1, ones, 2, 1.0))
    assert np.array_equal(out[:, 0, :, 0], np.repeat(np.arange(ROWS)[:, None], 8, 1))
    assert np.array_equal(out[:, 0, ::2, 1], np.repeat(n_valid[:, None] - 1, 4, 1))
    assert not out[:, 0, 1::2, 1].any()


GROUPED = CacheSpec((TokenCache(6), TokenCache(8, heads=4)), ())
"""Of the second layer's numbers the first 3 are values and the last 5 keys."""


def test_grouped_attention_is_that_of_each_head_with_its_own_keys(place: tuple[int, int]) -> None:
    """8 query heads over 4 KV heads: the softmax in float64, and every page where it should be."""
    made = make_layout(GROUPED, data=place[0], tensor=place[1], sequences=ROWS, max_context=128)
    grid, random = tiny.mesh(*place), np.random.default_rng(0)
    own, table = cache_io(made, grid), PageTable(made)
    rows = [table.open(number * place[0] // ROWS) for number in range(ROWS)]
    for row in rows:
        assert row is not None
        table.grow(row, 128)
    pages = table_of(rows, made)
    bits = jax.device_put(patterns(random, made.shape), pool_sharding(grid))
    kept = random.standard_normal((ROWS, 70, 4, 8)).astype(np.float32)
    q = random.standard_normal((ROWS, 2, 8, 5)).astype(np.float32)
    n_valid = np.array([70, 64, 3, 66], np.int32)

    @jax.jit
    def both(pool: Any, pages: Pages, q: Any, n_valid: Any, kept: Any) -> Any:
        pool = own.write_tokens(pool, pages, 1, 0 * n_valid, n_valid, kept)
        return pool, own.attend(pool, pages, 1, q, n_valid - 2, 0 * n_valid + 2, 3, 0.5)

    pool, out = jax.tree.map(np.asarray, both(bits, pages, q, n_valid, kept))
    for index, head, token in np.ndindex(ROWS, 8, 2):
        seen = np.float64(kept[index, : n_valid[index] - 1 + token, head // 2])
        shares = np.exp(seen[:, 3:] @ q[index, token, head] * 0.5)
        want = shares @ seen[:, :3] / shares.sum()
        np.testing.assert_allclose(out[index, token, head], want, atol=1e-5)
    for index, head in np.ndindex(ROWS, 4):
        local, row = 4 // place[1], rows[index]
        assert row is not None
        held = pool[row.shard, head // local, row.tokens[1 + head % local]].view(np.float32)
        held = held.reshape(2, -1)[:, : 64 * 8].reshape(128, 8)
        assert same_bits(held[: n_valid[index]], kept[index, : n_valid[index], head])


def test_a_rank_holds_its_heads_under_the_same_page() -> None:
    """Heads 2r and 2r + 1 of layer 0 share the page of rank r: 8 lines each, state before tail."""
    setup, own = Setup(2, 2), io(2, 2)
    heads = np.arange(4, dtype=np.float32)[None, :, None, None]
    state = np.broadcast_to(heads + 1, (ROWS, 4, 16, 16))
    tail = np.broadcast_to(-(heads + 1), (ROWS, 4, 3, 48))
    n_valid = np.ones(ROWS, np.int32)
    pool = own.write_state(setup.pool, setup.pages, 0, n_valid, state)
    pool = np.asarray(own.write_tail(pool, setup.pages, 0, n_valid, tail))
    row = setup.rows[3]
    for head in range(4):
        page = pool[row.shard, head // 2, row.states[0]].view(np.float32)
        words = page[8 * (head % 2) :].reshape(-1)
        assert (words[:256] == head + 1).all()
        assert (words[256:400] == -(head + 1)).all()


def test_nobody_reads_the_null_page(place: tuple[int, int]) -> None:
    setup, own = Setup(*place), io(*place)
    reads = [
        partial(own.read_tail, pages=setup.pages, layer=1),
        partial(own.read_state, pages=setup.pages, layer=0),
    ]
    before = [jax.tree.leaves(read(setup.pool)) for read in reads]
    other = setup.bits.copy()
    other[:, :, NULL_PAGE] ^= np.uint32(0xFFFFFFFF)
    pool = jax.device_put(other, pool_sharding(setup.mesh))
    for read, old in zip(reads, before, strict=True):
        assert all(map(same_bits, jax.tree.leaves(read(pool)), old))


def test_a_new_pool_is_zero_and_cut_over_the_mesh(place: tuple[int, int]) -> None:
    own = layout(*place)
    pool = make_pool(own, tiny.mesh(*place))
    assert not np.asarray(pool).any()
    assert {s.data.shape for s in pool.addressable_shards} == {(1, 1, own.pages, own.lines, 128)}
    assert len(pool.addressable_shards) == place[0] * place[1]


def test_clearing_zeroes_these_pages_of_this_shard(place: tuple[int, int]) -> None:
    setup = Setup(*place)
    shard, pages = place[0] - 1, np.array([3, 5, 0, 0], np.int32)
    setup.pool = jax.jit(clear_pages)(setup.pool, np.int32(shard), pages)
    assert not np.asarray(setup.pool)[shard, :, [0, 3, 5]].any()
    assert setup.changed() == {(shard, 0), (shard, 3), (shard, 5)}


def test_pages_are_the_table_of_their_rows() -> None:
    setup = Setup(1, 1)
    assert isinstance(setup.pages, Pages)
    assert setup.pages.tokens.shape == (ROWS, 2, 2)
    assert setup.pages.states.shape == (ROWS, 2 + 4)
