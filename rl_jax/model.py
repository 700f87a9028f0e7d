"""[P] What a program knows of a model: pure functions over a parameter pytree.

`rl_jax` never imports `models`; programs receive a `Model`. A cache is described by `CacheSpec` and
touched only through the functions of `CacheIO`, so a model does not know what a page is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from rl_jax.arrays import AnyArray, Array, Tree


class TokenCache(NamedTuple):
    """One layer that keeps `width` float32 numbers per token and head.

    MLA keeps its normed latent once for all heads. A head of grouped-query attention has pages of
    its own, so a shard over heads is a set of pages.
    """

    width: int
    heads: int = 1


class StateCache(NamedTuple):
    """One layer that keeps, per sequence and head, a recurrent state and a convolution tail.

    `state` is float32[key, value]; `tail` is float32[taps, channels]: the last `taps` inputs of the
    short convolution that belong to this head, oldest first. Whole heads, so a shard over heads is
    a set of pages.
    """

    heads: int
    state: tuple[int, int]
    tail: tuple[int, int]


class CacheSpec(NamedTuple):
    """What a sequence keeps, per layer of each kind, in layer order."""

    tokens: tuple[TokenCache, ...]
    states: tuple[StateCache, ...]


class CacheIO(NamedTuple):
    """The only way to the pool. `pages` is the opaque page table of the R requests.

    Layers are numbered within their kind: `layer` 0 is the first entry of `CacheSpec.tokens`
    (`write_tokens`, `attend`) or of `CacheSpec.states` (the others). Rows with n_valid 0 keep what
    they had. What is read for a request at position 0 is garbage that the caller replaces by zeros
    with `where`.
    """

    write_tokens: Callable[[Array, Any, int, Array, Array, Array], Array]
    """(pool, pages, layer, positions[R], n_valid[R], values[R, n, heads, width]) -> pool."""
    attend: Callable[[Array, Any, int, Array, Array, Array, int, float], Array]
    """(pool, pages, layer, q[R, n, H, W], positions[R], n_valid[R], value_width, scale) ->
    out[R, n, H, value_width]: causal attention of n tokens that are written to all up to them. The
    last W numbers that a token keeps per head are its key, the first `value_width` its value. Of
    `heads` kept ones each serves H / heads that lie side by side."""
    advance: Callable[[Array, Any, int, Array, Array, tuple[Array, ...]], tuple[Array, Array]]
    """(pool, pages, layer, positions[R], n_valid[R], (q, k, v, g, beta)[R, n, H, ..]) ->
    (out[R, n, H, V], pool): at most 16 tokens one after the other from the states that are kept;
    from zeros for a request at position 0."""
    read_state: Callable[[Array, Any, int], Array]
    """(pool, pages, layer) -> state[R, H, K, V]."""
    write_state: Callable[[Array, Any, int, Array, Array], Array]
    """(pool, pages, layer, n_valid[R], state[R, H, K, V]) -> pool."""
    read_tail: Callable[[Array, Any, int], Array]
    """(pool, pages, layer) -> tail[R, H, taps, channels]."""
    write_tail: Callable[[Array, Any, int, Array, Array], Array]
    """(pool, pages, layer, n_valid[R], tail[R, H, taps, channels]) -> pool."""


class Routing(NamedTuple):
    """How a mixture of experts spreads tokens: M layers of E experts, k of them for each token.

    Choices are int32[R, n, M, k]; the router's own are what it takes by itself.
    """

    layers: int
    experts: int
    chosen: int
    forward: Callable[[Tree, AnyArray, AnyArray, AnyArray, AnyArray | None], tuple[Array, Array]]
    """`Model.forward` with choices to use instead of the router's own, -1 for a token's own; also
    returns the router's own."""
    extend: Callable[
        [Tree, AnyArray, AnyArray, AnyArray, Any, Array, CacheIO], tuple[Array, Array, Array]
    ]
    """`Model.extend` that also returns the choices."""
    balance: Callable[[Tree, Array, float], Tree]
    """(params, load[M, E], rate) -> params whose correction biases moved by `rate` towards the mean
    load (arXiv 2408.15664)."""


class Model(NamedTuple):
    """A policy as pure functions; `params` is a pytree with the structure of `init(key)`."""

    init: Callable[[Array], Tree]
    """(key) -> params."""
    axes: Callable[[], Tree]
    """() -> the tree of params with, for each leaf, a tuple of logical axis names or None."""
    forward: Callable[[Tree, AnyArray, AnyArray, AnyArray], Array]
    """(params, tokens[R, L], positions[R, L], segment_ids[R, L]) -> hidden[R, L, D] on packed rows:
    trajectories start at multiples of 64, padding has segment -1, positions count within the
    trajectory."""
    cache_spec: CacheSpec
    extend: Callable[[Tree, AnyArray, AnyArray, AnyArray, Any, Array, CacheIO], tuple[Array, Array]]
    """(params, tokens[R, n], n_valid[R], positions[R], pages, pool, io) -> (hidden[R, n, D], pool).
    `positions[R]` is the position of the first of the n tokens. n = 1 is decode; any n is prefill,
    cut equal to training where `positions` is a multiple of 64."""
    head: Callable[[Tree, Array, Array, int], Array]
    """(params, hidden[..., D], start, size) -> float32 logits[..., size] of the vocabulary slice
    [start, start + size), which lies inside it; `start` may be traced, `size` is static."""
    vocab_size: int
    routing: Routing | None = None
    """Of a model with experts."""
