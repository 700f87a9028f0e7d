"""A model to compute by hand: the logits after token a are row a of a table.

The table is also its own oracle in float64: `logprobs` and `cross_entropy_gradient`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import Array, Tree
from rl_jax.model import CacheSpec, Model


def bigram(vocab: int) -> Model:
    """Keeps no cache and cannot sample: a model for the trainer alone."""

    def init(key: Array) -> Tree:
        return {"table": jax.random.normal(key, (vocab, vocab))}

    def forward(params: Tree, tokens: Array, positions: Array, segment_ids: Array) -> Array:
        return params["table"][tokens]

    def head(params: Tree, hidden: Array, start: Array, size: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(hidden, start, size, -1)

    def extend(*inputs):
        raise NotImplementedError("the bigram keeps no cache")

    axes = {"table": ("vocab", None)}
    return Model(init, lambda: axes, forward, CacheSpec((), ()), extend, head, vocab)


def table(vocab: int, seed: int = 0) -> Tree:
    return {"table": jnp.asarray(_normal(seed, (vocab, vocab)))}


def logprobs(table: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log p(token t | token t - 1), float64[T]; entry 0 is 0."""
    own = np.zeros(len(tokens))
    own[1:] = log_softmax(table / temperature)[tokens[:-1], tokens[1:]]
    return own


def cross_entropy_gradient(
    table: np.ndarray, tokens: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Of sum(weights * -log p) with respect to the table, float64."""
    gradient = np.zeros(table.shape)
    for before, token, weight in zip(tokens[:-1], tokens[1:], weights[1:], strict=True):
        gradient[before] += weight * np.exp(log_softmax(table)[before])
        gradient[before, token] -= weight
    return gradient


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = np.asarray(logits, np.float64)
    top = exact.max(axis=-1, keepdims=True)
    return exact - top - np.log(np.exp(exact - top).sum(axis=-1, keepdims=True))


def _normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
