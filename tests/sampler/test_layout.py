"""The pool: sizes by hand, and bits that arrive where they should and nowhere else."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from rl_jax.model import CacheIO, CacheSpec, StateCache, TokenCache
from rl_jax.sampler.layout import (
    NULL_PAGE,
    Layout,
    Pages,
    cache_io,
    clear_pages,
    head_words,
    make_layout,
    make_pool,
    pool_sharding,
)
from rl_jax.sampler.page_table import PageRow, PageTable, table_of
from tests.fakes import tiny

# Heads of 16 * 16 + 3 * 48 = 400 words and of 4 * 6 + 2 * 8 = 40 words.
SPEC = CacheSpec(
    (TokenCache(6), TokenCache(10)),
    (StateCache(4, (16, 16), (3, 48)), StateCache(8, (4, 6), (2, 8))),
)
MESHES = [(1, 1), (2, 2)]
ROWS = 4


def layout(data: int = 1, tensor: int = 1) -> Layout:
    return make_layout(SPEC, data=data, tensor=tensor, sequences=ROWS, max_context=128)


# --- sizes ---------------------------------------------------------------------------------------


def test_sizes_by_hand() -> None:
    made = layout(data=2, tensor=2)
    assert [head_words(c) for c in SPEC.states] == [400, 40]
    assert made.words == 640, "64 tokens of the wider latent"
    # Of 2 and 4 heads a rank: one of 400 words fits into 640, and all four of 40 words.
    assert made.heads_per_page == (1, 4)
    assert [made.state_pages(i) for i in (0, 1)] == [2, 1]
    assert made.token_pages == 2
    assert made.pages_per_sequence == 2 + 1 + 2 * 2
    assert made.pages == 1 + 2 * 7, "the null page and two sequences a shard"
    assert made.bytes == 2 * 2 * 15 * 640 * 4
    assert layout().pages == 1 + 4 * (4 + 1 + 4)


def test_a_page_is_as_large_as_the_largest_head() -> None:
    spec = CacheSpec((TokenCache(4),), (StateCache(2, (16, 16), (3, 48)),))
    made = make_layout(spec, data=1, tensor=1, sequences=1, max_context=64)
    assert (made.words, made.heads_per_page) == (400, (1,))


@pytest.mark.parametrize(("heads", "width", "expected"), [(6, 30, 3), (6, 35, 3), (5, 30, 1)])
def test_heads_per_page_divides_the_heads(heads: int, width: int, expected: int) -> None:
    """Pages of 1920 and 2240 words hold 4 and 5 heads of 400 words, of which 6 heads take 3."""
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


# --- bits ----------------------------------------------------------------------------------------


class Setup:
    """A pool of random bits, many of them NaN patterns, and four sequences that own their pages."""

    def __init__(self, data: int, tensor: int) -> None:
        self.layout, self.mesh = layout(data, tensor), tiny.mesh(data, tensor)
        self.random = np.random.default_rng(0)
        shape = (data, tensor, self.layout.pages, self.layout.words)
        self.bits = patterns(self.random, shape)
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
        differ = (now != self.bits).any(axis=(1, 3))
        self.bits = now
        return {(int(shard), int(page)) for shard, page in np.argwhere(differ)}


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
    return CacheIO(*(jax.jit(function, static_argnums=2) for function in made))


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
        setup.pool = own.write_tokens(setup.pool, setup.pages, layer, positions, n_valid, values)
        expected = {(row.shard, NULL_PAGE) for row in setup.rows}
        for index, (at, n) in enumerate(zip(positions, counts, strict=True)):
            logs[layer][index, at : at + n] = values[index, :n]
            touched = range(at // 64, -(-(at + n) // 64)) if n else []
            row = setup.rows[index]
            expected |= {(row.shard, int(row.tokens[layer, page])) for page in touched}
        written[layer] += n_valid
        assert setup.changed() <= expected
    for layer in (0, 1):
        got = np.asarray(own.read_tokens(setup.pool, setup.pages, layer))
        for index, n in enumerate(written[layer]):
            assert same_bits(got[index, :n], logs[layer][index, :n])


def test_states_come_back_bit_for_bit(place: tuple[int, int]) -> None:
    setup, own = Setup(*place), io(*place)
    for layer, cache_ in enumerate(SPEC.states):
        state = floats(setup.random, (ROWS, cache_.heads, *cache_.state))
        tail = floats(setup.random, (ROWS, cache_.heads, *cache_.tail))
        before = own.read_state(setup.pool, setup.pages, layer)
        n_valid = np.array([1, 0, 64, 2], np.int32)
        setup.pool = own.write_state(setup.pool, setup.pages, layer, n_valid, state, tail)
        counts = [setup.layout.state_pages(i) for i in range(layer + 1)]
        mine = slice(sum(counts[:-1]), sum(counts))
        expected = {(setup.rows[1].shard, NULL_PAGE)}  # where the idle row's state goes
        for index in (0, 2, 3):
            row = setup.rows[index]
            expected |= {(row.shard, int(page)) for page in row.states[mine]}
        assert setup.changed() == expected
        after = own.read_state(setup.pool, setup.pages, layer)
        for old, new, put in zip(before, after, (state, tail), strict=True):
            for index in range(ROWS):
                kept = old if index == 1 else put
                assert same_bits(np.asarray(new)[index], np.asarray(kept)[index])


def test_a_rank_holds_its_heads_under_the_same_page() -> None:
    """Head h of layer 0 is page h % 2 of rank h // 2, alone, state before tail."""
    setup, own = Setup(2, 2), io(2, 2)
    heads = np.arange(4, dtype=np.float32)[None, :, None, None]
    state = np.broadcast_to(heads + 1, (ROWS, 4, 16, 16))
    tail = np.broadcast_to(-(heads + 1), (ROWS, 4, 3, 48))
    n_valid = np.ones(ROWS, np.int32)
    pool = np.asarray(own.write_state(setup.pool, setup.pages, 0, n_valid, state, tail))
    row = setup.rows[3]
    for head in range(4):
        page = pool[row.shard, head // 2, row.states[head % 2]].view(np.float32)
        assert (page[:256] == head + 1).all()
        assert (page[256:400] == -(head + 1)).all()


def test_nobody_reads_the_null_page(place: tuple[int, int]) -> None:
    setup, own = Setup(*place), io(*place)
    reads = [
        partial(own.read_tokens, pages=setup.pages, layer=1),
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
    assert {shard.data.shape for shard in pool.addressable_shards} == {(1, 1, own.pages, own.words)}
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
    assert setup.pages.states.shape == (ROWS, 4 + 1)
