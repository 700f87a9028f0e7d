"""The compiled steps hold what a batch needs, never a copy of the pool."""

from launch import build
from rl_jax.sampler.layout import make_layout
from rl_jax.sampler.programs import compile_programs
from tests.fakes import tiny


def test_no_step_copies_the_pool() -> None:
    """A pool of 3,000 long sequences; the temporaries of a step of 4 stay below a fiftieth."""
    own, mesh = tiny.model(), tiny.mesh(1, 2)
    layout = make_layout(own.cache_spec, data=1, tensor=2, sequences=3000, max_context=1024)
    params = build.abstract_params(own, mesh)
    programs = compile_programs(own, params, layout, tiny.FEW, mesh, tiny.SEED)
    pool = layout.bytes // 2
    for width, step in programs.steps.items():
        sizes = step.memory_analysis()
        assert sizes.temp_size_in_bytes < pool / 50, width
        assert sizes.alias_size_in_bytes >= pool, "the pool is updated where it is"
