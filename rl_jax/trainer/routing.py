"""[P] What a router did in a step: load of the experts, choices that differ from replayed ones.

Counts are whole numbers, summed over microbatches, so neither the split nor the mesh changes them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl_jax.masking import PADDING
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean
from rl_jax.model import Routing
from rl_jax.trainer.batches import Batch


class Routed(NamedTuple):
    """The router's own choices in some microbatches; padding is left out."""

    load: Int[Array, "M E"]
    """Tokens that each expert of each layer was chosen for."""
    recorded: Int[Array, ""]
    """Choices that came with the batch, and ..."""
    differing: Int[Array, ""]
    """... how many of those the router did not make itself."""


def tally(routing: Routing, own: Int[Array, "R L M k"], part: Batch) -> Routed:
    """Of one microbatch."""
    real = (jnp.asarray(part.segment_ids) != PADDING)[..., None, None]
    layers = jnp.arange(routing.layers)[:, None]
    # One past the last expert, where nothing is added.
    where = jnp.where(real, own, routing.experts)
    empty = jnp.zeros((routing.layers, routing.experts), jnp.int32)
    load = empty.at[jnp.broadcast_to(layers, where.shape), where].add(1, mode="drop")
    if part.choices is None:
        return Routed(load, jnp.int32(0), jnp.int32(0))
    given = jnp.asarray(part.choices).astype(jnp.int32)
    known = real & (given >= 0)
    same = (given[..., :, None] == own[..., None, :]).any(axis=-1)
    return Routed(load, jnp.sum(known), jnp.sum(known & ~same))


def told(routed: Routed) -> dict[str, Mean]:
    """The metrics of a step."""
    load = routed.load.astype(jnp.float32)
    found = {
        names.ROUTER_LARGEST_LOAD: _number(jnp.max(load) / jnp.maximum(jnp.mean(load), 1e-9)),
        names.ROUTER_UNUSED_SHARE: _number(jnp.mean((routed.load == 0).astype(jnp.float32))),
    }
    counts = routed.differing.astype(jnp.float32), routed.recorded.astype(jnp.float32)
    return found | {names.ROUTER_DIFFERING_SHARE: Mean(*counts)}


def _number(value: Float[Array, ""]) -> Mean:
    return Mean(value, jnp.ones_like(value))
