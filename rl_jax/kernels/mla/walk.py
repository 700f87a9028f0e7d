"""[P] Blocks of queries that walk over pages of keys, in groups where they have few queries.

A step of a walk has a cost of its own, which for a few queries is most of it. So lanes with few
queries are sorted by their pages and walk in groups, a page of each lane at a time, while at least
half of a group has pages left; the others of it go on alone. Never are more than twice as many
pages folded as the lanes have. No number of a lane meets one of another.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.mla import online
from rl_jax.kernels.pages import DevicePool, read_lines

GROUP_WORDS = 2**17
"""Numbers in a page of each lane of a group at most: they fit a CPU core's cache."""
GROUP_QUERIES = 128
"""Queries of a group at most, counted over heads."""
FEWEST = 4
"""Lanes that a group must have room for, or walks alone are as fast."""

Carry = tuple[Array, Array]


class Lanes(NamedTuple):
    """N lanes, or one without the first axis."""

    q: Float[Array, "*N H C W"]
    row: Int[Array, "*N"]
    """Of the page table."""
    position: Int[Array, "*N"]
    """Of the first query."""
    written: Int[Array, "*N"]
    """Tokens that the row's pages hold; 0 for an idle lane."""

    @property
    def used(self) -> Int[Array, "*N"]:
        """Pages that some query may see."""
        end = self.position + self.q.shape[-2]
        return -(-jnp.minimum(self.written, end) // CHUNK)


class Entries(NamedTuple):
    """Pages and their tokens, each `width` numbers: the last ones its key, the first its value."""

    pool: DevicePool
    table: Int[Array, "R S"]
    width: int
    value_width: int
    scale: float


Fold = Callable[[Lanes, Array, Carry], Carry]


def walk(lanes: Lanes, entries: Entries) -> Float[Array, "N H C V"]:
    """Attention of every lane to its pages, in the precision of sums; zeros for an idle lane."""
    count, heads, block = lanes.q.shape[:3]
    most = min(GROUP_QUERIES // (heads * block), GROUP_WORDS // (CHUNK * entries.width))
    fold = partial(_fold, entries)
    if count == 1 or most < FEWEST:
        return jax.lax.map(
            lambda lane: online.finish(_alone(fold, lane, entries.value_width)), lanes
        )
    groups = -(-count // most)
    group = -(-count // groups)
    lanes = jax.tree.map(lambda x: _padded(x, groups * group), lanes)
    order = jnp.argsort(-lanes.used)

    def together(chosen: Int[Array, " G"]) -> Float[Array, "G H C V"]:
        return _together(fold, jax.tree.map(lambda x: x[chosen], lanes), entries.value_width)

    out = jax.lax.map(together, order.reshape(groups, group))
    out = out.reshape(-1, heads, block, entries.value_width)
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True)[:count]


def _padded(x: Array, count: int) -> Array:
    """With idle lanes."""
    return jnp.pad(x, ((0, count - len(x)), *((0, 0),) * (x.ndim - 1)))


def _fold(entries: Entries, lane: Lanes, number: Array, carry: Carry) -> Carry:
    """One lane's step over its page `number`."""
    page = entries.table[lane.row, number]
    words = read_lines(entries.pool, page, jnp.zeros_like(page), CHUNK * entries.width)
    key = number * CHUNK + jnp.arange(CHUNK)
    exists = key < lane.written
    tokens = jnp.where(exists[:, None], words.reshape(CHUNK, -1), 0.0)  # garbage may be NaN
    query = lane.position + jnp.arange(lane.q.shape[1])
    mask = (key <= query[:, None]) & exists
    return online.fold(carry, lane.q, tokens.astype(lane.q.dtype), mask, entries.scale)


def _alone(fold: Fold, lane: Lanes, value_width: int) -> Carry:
    empty = online.empty(lane.q, value_width)
    return jax.lax.fori_loop(0, lane.used, partial(fold, lane), empty)


def _together(fold: Fold, lanes: Lanes, value_width: int) -> Float[Array, "G H C V"]:
    """Lanes in descending order of their pages."""
    used = lanes.used
    shared = used[(len(used) - 1) // 2]

    def step(number: Array, carry: Carry) -> Carry:
        return jax.vmap(fold, (0, None, 0))(lanes, number, carry)

    def rest(index: Array, carry: Carry) -> Carry:
        lane, own = jax.tree.map(lambda x: x[index], (lanes, carry))
        own = jax.lax.fori_loop(shared, used[index], partial(fold, lane), own)
        return jax.tree.map(lambda whole, x: whole.at[index].set(x), carry, own)

    empty = jax.vmap(partial(online.empty, value_width=value_width))(lanes.q)
    carry = jax.lax.fori_loop(0, shared, step, empty)
    carry = jax.lax.fori_loop(0, (used > shared).sum(), rest, carry)
    return jax.vmap(online.finish)(carry)
