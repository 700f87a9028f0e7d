"""[P] The sampler's step: extend R sequences by up to n tokens, sample one token for each.

Decode (n = 1) and prefill (n > 1) are the same function at other shapes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt32

from rl_jax import rng
from rl_jax.arrays import AnyArray, Tree
from rl_jax.model import CacheIO, Model
from rl_jax.sampler.layout import Pages, Pool
from rl_jax.sampler.sampling import Sampled, sample


class StepInputs(NamedTuple):
    """Made on the host. Idle rows have n_valid 0, null pages and temperature 0."""

    tokens: Int[AnyArray, "R n"]
    n_valid: Int[AnyArray, " R"]
    positions: Int[AnyArray, " R"]
    """Position of the first of the n tokens."""
    pages: Pages
    streams: UInt32[AnyArray, "R 2"]
    temperature: Float[AnyArray, " R"]


SampleStep = Callable[[Tree, Pool, StepInputs], tuple[Pool, Sampled]]


def make_sample_step(model: Model, io: CacheIO, seed: int, *, record: bool = False) -> SampleStep:
    """The pure step (params, pool, inputs) -> (pool, sampled); jit it with the pool donated.

    A row's token is the one after its last valid token, drawn at that token's absolute position.
    With `record` it also tells to which experts the n tokens went, in a byte each up to 256
    experts; ValueError where the model has none.
    """
    routing = model.routing if record else None
    if record and routing is None:
        raise ValueError("record: needs a model with experts")

    def step(params: Tree, pool: Pool, inputs: StepInputs) -> tuple[Pool, Sampled]:
        tokens, n_valid, positions = map(jnp.asarray, inputs[:3])
        arrays = params, tokens, n_valid, positions, inputs.pages, pool, io
        choices = None
        if routing is None:
            hidden, pool = model.extend(*arrays)
        else:
            hidden, pool, own = routing.extend(*arrays)
            choices = own.astype(jnp.uint8 if routing.experts <= 256 else jnp.uint16)
        last = jnp.maximum(n_valid - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        logits = model.head(params, hidden, jnp.int32(0), model.vocab_size)
        key = rng.base(seed, rng.Purpose.SAMPLE)
        uniforms = rng.uniforms(key, jnp.asarray(inputs.streams), positions + n_valid)
        sampled = sample(logits, jnp.asarray(inputs.temperature), uniforms)
        return pool, sampled._replace(choices=choices)

    return jax.named_call(step, name="sample_step")
