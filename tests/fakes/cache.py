"""[P] A cache without pages: one dense array per layer, the request's row is its number."""

import jax
import jax.numpy as jnp

from rl_jax.arrays import CHUNK, Array, Tree
from rl_jax.model import CacheIO, CacheSpec


def dense_pool(spec: CacheSpec, rows: int, context: int, fill: float = jnp.nan) -> Tree:
    """Arrays for `rows` requests of at most `context` tokens, full of garbage."""
    if context % CHUNK:
        raise ValueError(f"context is {context}; it must be a multiple of {CHUNK}")
    return {
        "tokens": [jnp.full((rows, context, c.width), fill) for c in spec.tokens],
        "state": [jnp.full((rows, c.heads, *c.state), fill) for c in spec.states],
        "tail": [jnp.full((rows, c.heads, *c.tail), fill) for c in spec.states],
    }


def _replace(pool: Tree, kind: str, layer: int, value: Array) -> Tree:
    layers = list(pool[kind])
    layers[layer] = value
    return {**pool, kind: layers}


def _write_tokens(pool, pages, layer, positions, n_valid, values):
    def one(row, position, valid, new):
        index = position + jnp.arange(new.shape[0])
        index = jnp.where(jnp.arange(new.shape[0]) < valid, index, row.shape[0])
        return row.at[index].set(new, mode="drop")

    kept = pool["tokens"][layer]
    rows = jax.vmap(one)(kept[pages], positions, n_valid, values)
    return _replace(pool, "tokens", layer, kept.at[pages].set(rows))


def _write_state(pool, pages, layer, n_valid, state, tail):
    for kind, value in (("state", state), ("tail", tail)):
        kept = pool[kind][layer]
        busy = (n_valid > 0).reshape(-1, *(1,) * (value.ndim - 1))
        rows = jnp.where(busy, value, kept[pages])
        pool = _replace(pool, kind, layer, kept.at[pages].set(rows))
    return pool


DENSE = CacheIO(
    read_tokens=lambda pool, pages, layer: pool["tokens"][layer][pages],
    write_tokens=_write_tokens,
    read_state=lambda pool, pages, layer: (pool["state"][layer][pages], pool["tail"][layer][pages]),
    write_state=_write_state,
)
"""`pages` is int32[R]: the row of the pool that belongs to each request."""
