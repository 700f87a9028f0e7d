"""[H] The sampler's device: parameters and pool exactly, what a step adds by estimate."""

from jax.sharding import AbstractMesh

from launch import build
from launch.plan.base import Part, Program, bytes_of
from rl_jax.arrays import round_up
from rl_jax.config.run import RunConfig
from rl_jax.model import Model
from rl_jax.sampler.layout import make_layout

ROWS_OF_LOGITS = 5
"""Arrays of [rows, vocabulary] at once: logits, two log-softmaxes, probabilities, their sums."""


def plan_sampler(config: RunConfig, model: Model) -> Program:
    """Of a run of `config`. ValueError naming what does not divide over the mesh."""
    sizes, own = config.mesh.sampler.model_dump(), config.sampler
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    params = bytes_of(build.abstract_params(model, mesh, own.param_dtype))
    layout = make_layout(
        model.cache_spec,
        data=sizes["data"],
        tensor=sizes["tensor"],
        sequences=round_up(own.sessions, sizes["data"]),
        max_context=own.max_context,
    )
    pool = layout.bytes // (sizes["data"] * sizes["tensor"])
    held = (Part("parameters", params, True), Part("caches", pool, True))
    rows = max(own.slots, own.prefill_rows) // sizes["data"]
    widest = max(own.slots, own.prefill_rows * own.prefill_tokens[-1]) // sizes["data"]
    sizes_of_layer = 8 * config.model.width + 4 * config.model.ffn // sizes["tensor"]
    step = (
        Part("logits", ROWS_OF_LOGITS * 4 * rows * model.vocab_size, False),
        Part("one layer's activations", 4 * widest * sizes_of_layer, False),
    )
    # A version is staged in the background, so beside the steps.
    staged = (Part("staging of a push", params, True), *step)
    return Program("sampler", sizes, held, {"step and push": staged})
