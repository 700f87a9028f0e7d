"""The bigram with experts: tokens choose experts whose rows are added to their logits.

Small enough for numpy: `choices` is its oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import Array, Tree
from rl_jax.model import Model, Routing
from tests.fakes.bigram import bigram, table

EXPERTS, CHOSEN, LAYERS = 4, 2, 2


def routed(vocab: int) -> Model:
    """Two layers of four experts, two of them for each token."""

    def forward(params, tokens, positions, segment_ids, choices):
        hidden, own = params["table"][tokens], []
        for layer in range(LAYERS):
            ranks = params["router"][layer][tokens] + params["bias"][layer]
            found = jax.lax.top_k(ranks, CHOSEN)[1].astype(jnp.int32)
            given = found if choices is None else choices[:, :, layer]
            used = jnp.where((given >= 0).all(-1, keepdims=True), given, found)
            hidden = hidden + params["experts"][layer][used].sum(axis=-2)
            own.append(found)
        return hidden, jnp.stack(own, axis=2)

    def balance(params: Tree, load: Array, rate: float) -> Tree:
        moved = params["bias"] + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
        return params | {"bias": moved}

    def plain(params, tokens, positions, segment_ids):
        return forward(params, tokens, positions, segment_ids, None)[0]

    model = bigram(vocab)
    routing = Routing(LAYERS, EXPERTS, CHOSEN, forward, model.extend, balance)
    return model._replace(forward=plain, routing=routing)


def weights(vocab: int, seed: int = 0) -> Tree:
    draws = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return jnp.asarray(draws.normal(size=shape), jnp.float32)

    return table(vocab) | {
        "router": normal(LAYERS, vocab, EXPERTS),
        "bias": jnp.zeros((LAYERS, EXPERTS)),
        "experts": normal(LAYERS, EXPERTS, vocab),
    }


def choices(params: Tree, tokens: np.ndarray) -> np.ndarray:
    """int[T, layers, k]: what the router chooses, best first."""
    ranks = np.asarray(params["router"])[:, tokens] + np.asarray(params["bias"])[:, None]
    return np.moveaxis(np.argsort(-ranks, axis=-1, kind="stable")[..., :CHOSEN], 0, 1)
