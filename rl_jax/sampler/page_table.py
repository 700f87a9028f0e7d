"""[N] Which pages are free: one allocator per data shard, pages of any kind.

Holds no array of the device; the engine asks it before a sequence starts or grows.
"""

from typing import NamedTuple

import numpy as np

from rl_jax.arrays import CHUNK
from rl_jax.kernels.pages import NULL_PAGE
from rl_jax.sampler.layout import Layout, Pages


class PageRow(NamedTuple):
    """The pages of one sequence: rows of a `Pages` table, null where nothing is allocated."""

    shard: int
    tokens: np.ndarray
    """int32[token caches, token pages]."""
    states: np.ndarray
    """int32[state pages]."""

    def owned(self) -> list[int]:
        """Every page this sequence holds."""
        pages = np.concatenate([self.tokens.reshape(-1), self.states])
        return [int(page) for page in pages if page != NULL_PAGE]


class PageTable:
    """Free pages of every data shard. A sequence's pages are its own until it is released.

    A shard takes no more sequences than it has pages for at the longest context, so an open one can
    always grow.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._free = [list(range(layout.pages - 1, NULL_PAGE, -1)) for _ in range(layout.data)]
        self._room = [(layout.pages - 1) // layout.pages_per_sequence] * layout.data
        self._state_pages = sum(layout.state_pages(i) for i in range(len(layout.spec.states)))

    def room(self, shard: int) -> int:
        """Sequences that a shard can still take."""
        return self._room[shard]

    def free(self, shard: int) -> int:
        """Free pages of a shard."""
        return len(self._free[shard])

    def open(self, shard: int) -> PageRow | None:
        """State pages for a new sequence; None where the shard has no room."""
        if not self._room[shard]:
            return None
        self._room[shard] -= 1
        shape = (self._layout.token_caches, self._layout.token_pages)
        states = np.array(self._take(shard, self._state_pages), np.int32)
        return PageRow(shard, np.full(shape, NULL_PAGE, np.int32), states)

    def grow(self, row: PageRow, tokens: int) -> None:
        """Allocates token pages so that the sequence can hold `tokens`.

        Raises ValueError for more than the longest context.
        """
        need = -(-tokens // CHUNK)
        if need > self._layout.token_pages:
            raise ValueError(f"{tokens} tokens exceed {self._layout.token_pages} pages of {CHUNK}")
        if not need or (row.tokens[:, need - 1] != NULL_PAGE).all():
            return
        for cache in row.tokens:
            held = int(np.count_nonzero(cache))
            cache[held:need] = self._take(row.shard, max(need - held, 0))

    def release(self, row: PageRow) -> None:
        """Gives every page of the sequence back; the row must not be used again."""
        self._free[row.shard].extend(row.owned())
        self._room[row.shard] += 1
        row.tokens[:] = NULL_PAGE
        row.states[:] = NULL_PAGE

    def _take(self, shard: int, count: int) -> list[int]:
        return [self._free[shard].pop() for _ in range(count)]


def table_of(rows: list[PageRow | None], layout: Layout) -> Pages:
    """Stacks rows into a page table; None is an idle row."""
    count = len(rows)
    tokens = np.full((count, layout.token_caches, layout.token_pages), NULL_PAGE, np.int32)
    state_pages = sum(layout.state_pages(i) for i in range(len(layout.spec.states)))
    states = np.full((count, state_pages), NULL_PAGE, np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            tokens[index], states[index] = row.tokens, row.states
    return Pages(tokens, states)
