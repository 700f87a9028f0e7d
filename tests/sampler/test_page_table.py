"""The allocator: no page twice, none lost, and an open sequence can always grow."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_jax.kernels.pages import NULL_PAGE
from rl_jax.model import CacheSpec, StateCache, TokenCache
from rl_jax.sampler.layout import Layout, make_layout
from rl_jax.sampler.page_table import PageRow, PageTable, table_of
from tests.trajectories.build import steady

# Two token layers of at most 3 pages each and 1 + 2 state pages: 9 pages a sequence.
SPEC = CacheSpec(
    (TokenCache(64), TokenCache(2)),
    (StateCache(4, (4, 4), (2, 6)), StateCache(2, (44, 44), (3, 20))),
)


def layout(data: int = 2, sequences: int = 6) -> Layout:
    return make_layout(SPEC, data=data, tensor=1, sequences=sequences, max_context=192)


def opened(table: PageTable, shard: int = 0) -> PageRow:
    row = table.open(shard)
    assert row is not None
    return row


def test_a_sequence_takes_pages_as_it_grows() -> None:
    table = PageTable(layout())
    assert (table.free(0), table.room(0)) == (27, 3)
    row = opened(table)
    assert (table.free(0), table.room(0), len(row.owned())) == (24, 2, 3)
    for tokens, pages in ((1, 5), (64, 5), (65, 7), (10, 7), (192, 9)):
        table.grow(row, tokens)
        assert len(row.owned()) == pages
    assert (row.tokens != NULL_PAGE).all()
    assert table.free(1) == 27
    with pytest.raises(ValueError, match="193 tokens exceed 3 pages of 64"):
        table.grow(row, 193)
    table.release(row)
    assert (table.free(0), table.room(0), row.owned()) == (27, 3, [])


def test_a_shard_takes_no_more_sequences_than_can_grow_to_the_end() -> None:
    table = PageTable(layout())
    rows = [opened(table) for _ in range(3)]
    assert table.free(0) == 18
    assert table.open(0) is None
    assert table.open(1) is not None
    for row in rows:
        table.grow(row, 192)
    assert table.free(0) == 0


def test_stacked_rows() -> None:
    table = PageTable(layout())
    row = opened(table)
    table.grow(row, 70)
    pages = table_of([None, row], layout())
    assert not pages.tokens[0].any() and not pages.states[0].any()
    np.testing.assert_array_equal(pages.tokens[1], row.tokens)
    np.testing.assert_array_equal(pages.states[1], row.states)
    table.release(row)
    assert pages.tokens[1].any(), "a table is a copy"


class Allocations(RuleBasedStateMachine):
    @initialize(data=st.sampled_from([1, 2]))
    def start(self, data: int) -> None:
        self.layout = layout(data)
        self.table = PageTable(self.layout)
        self.rows: list[PageRow] = []

    @rule(shard=st.integers(0, 1))
    def open(self, shard: int) -> None:
        shard %= self.layout.data
        room = self.table.room(shard)
        row = self.table.open(shard)
        assert (row is None) == (room == 0)
        if row is not None:
            self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99), tokens=st.integers(0, 192))
    def grow(self, which: int, tokens: int) -> None:
        row = self.rows[which % len(self.rows)]
        before = row.tokens.copy()
        self.table.grow(row, tokens)
        assert (row.tokens[:, : -(-tokens // 64)] != NULL_PAGE).all()
        held = before != NULL_PAGE
        np.testing.assert_array_equal(row.tokens[held], before[held])

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        self.table.release(self.rows.pop(which % len(self.rows)))

    @invariant()
    def owned_and_free_are_all_there_is(self) -> None:
        for shard in range(self.layout.data):
            owned = [page for r in self.rows if r.shard == shard for page in r.owned()]
            assert len(set(owned)) == len(owned), "a page is owned twice"
            assert NULL_PAGE not in owned
            assert len(owned) + self.table.free(shard) == self.layout.pages - 1


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(steady, max_examples=30)
