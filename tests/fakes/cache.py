"""[P] A cache without pages: one dense array per layer, the request's row is its number."""

import jax
import jax.numpy as jnp

from rl_jax.arrays import CHUNK, Array, Tree
from rl_jax.kernels.kda.recurrent import recurrent
from rl_jax.kernels.mla import api as mla
from rl_jax.model import CacheIO, CacheSpec


def dense_pool(spec: CacheSpec, rows: int, context: int, fill: float = jnp.nan) -> Tree:
    """Arrays for `rows` requests of at most `context` tokens, full of garbage."""
    if context % CHUNK:
        raise ValueError(f"context is {context}; it must be a multiple of {CHUNK}")
    return {
        "tokens": [jnp.full((rows, c.heads, context, c.width), fill) for c in spec.tokens],
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
        index = jnp.where(jnp.arange(new.shape[0]) < valid, index, row.shape[1])
        return row.at[:, index].set(new.swapaxes(0, 1), mode="drop")

    kept = pool["tokens"][layer]
    rows = jax.vmap(one)(kept[pages], positions, n_valid, values)
    return _replace(pool, "tokens", layer, kept.at[pages].set(rows))


def _attend(pool, pages, layer, q, positions, n_valid, value_width, scale):
    """As pages that lie one after the other, one KV head after the other."""
    kept = pool["tokens"][layer][pages]
    shape = {"value_width": value_width, "scale": scale, "width": kept.shape[-1]}
    heads = zip(jnp.split(q, kept.shape[1], 2), kept.swapaxes(0, 1), strict=True)
    return jnp.concatenate(
        [_attend_one(own, k, positions, n_valid, **shape) for own, k in heads], 2
    )


def _attend_one(q, kept, positions, n_valid, **shape):
    bits = jax.lax.bitcast_convert_type(kept.reshape(-1, kept.shape[-1] * CHUNK // 128, 128), "u4")
    bits = jnp.pad(bits, ((0, 0), (0, -bits.shape[1] % 8), (0, 0)))
    table = jnp.arange(len(bits)).reshape(len(kept), -1)
    return mla.attend_pages(q, bits, table, positions, n_valid, **shape)


def _advance(pool, pages, layer, positions, n_valid, operands):
    state = _read("state")(pool, pages, layer)
    state = jnp.where((positions > 0)[:, None, None, None], state, 0.0)
    out, state = recurrent(*operands, state)
    return out, _write("state")(pool, pages, layer, n_valid, state)


def _read(kind):
    return lambda pool, pages, layer: pool[kind][layer][pages]


def _write(kind):
    def write(pool, pages, layer, n_valid, value):
        kept = pool[kind][layer]
        busy = (n_valid > 0).reshape(-1, *(1,) * (value.ndim - 1))
        rows = jnp.where(busy, value, kept[pages])
        return _replace(pool, kind, layer, kept.at[pages].set(rows))

    return write


DENSE = CacheIO(
    write_tokens=_write_tokens,
    attend=_attend,
    advance=_advance,
    read_state=_read("state"),
    write_state=_write("state"),
    read_tail=_read("tail"),
    write_tail=_write("tail"),
)
"""`pages` is int32[R]: the row of the pool that belongs to each request."""
