"""[N] Which pages are free: one allocator per data shard, pages of any kind.

Holds no array of the device; the engine asks it before a sequence starts or grows.
"""

from typing import NamedTuple

import numpy as np

from rl_jax.arrays import CHUNK
from rl_jax.sampler.layout import NULL_PAGE, Layout, Pages


class PageRow(NamedTuple):
    """The pages of one sequence: rows of a `Pages` table, null where nothing is allocated."""

    shard: int
    tokens: np.ndarray
    """int32[token layers, token pages]."""
    states: np.ndarray
    """int32[state pages]."""

    def owned(self) -> list[int]:
        """Every page this sequence holds."""
        pages = np.concatenate([self.tokens.reshape(-1), self.states])
        return [int(page) for page in pages if page != NULL_PAGE]


class PageTable:
    """Free pages of every data shard. A sequence's pages are its own until it is released."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._free = [list(range(layout.pages - 1, NULL_PAGE, -1)) for _ in range(layout.data)]
        self._state_pages = sum(layout.state_pages(i) for i in range(len(layout.spec.states)))

    def free(self, shard: int) -> int:
        """Free pages of a shard."""
        return len(self._free[shard])

    def open(self, shard: int) -> PageRow | None:
        """State pages for a new sequence; None where the shard has too few."""
        pages = self._take(shard, self._state_pages)
        if pages is None:
            return None
        shape = (len(self._layout.spec.tokens), self._layout.token_pages)
        return PageRow(shard, np.full(shape, NULL_PAGE, np.int32), np.array(pages, np.int32))

    def grow(self, row: PageRow, tokens: int) -> bool:
        """Allocates token pages so that the sequence can hold `tokens`; False where none is left."""
        layers = row.tokens.shape[0]
        for index in range(-(-tokens // CHUNK)):
            if not layers or row.tokens[0, index] != NULL_PAGE:
                continue
            pages = self._take(row.shard, layers)
            if pages is None:
                return False
            row.tokens[:, index] = pages
        return True

    def release(self, row: PageRow) -> None:
        """Gives every page of the sequence back; the row must not be used again."""
        self._free[row.shard].extend(row.owned())
        row.tokens[:] = NULL_PAGE
        row.states[:] = NULL_PAGE

    def _take(self, shard: int, count: int) -> list[int] | None:
        free = self._free[shard]
        if len(free) < count:
            return None
        return [free.pop() for _ in range(count)]


def table_of(rows: list[PageRow | None], layout: Layout) -> Pages:
    """Stacks rows into a page table; None is an idle row."""
    count = len(rows)
    tokens = np.full((count, len(layout.spec.tokens), layout.token_pages), NULL_PAGE, np.int32)
    state_pages = sum(layout.state_pages(i) for i in range(len(layout.spec.states)))
    states = np.full((count, state_pages), NULL_PAGE, np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            tokens[index], states[index] = row.tokens, row.states
    return Pages(tokens, states)
