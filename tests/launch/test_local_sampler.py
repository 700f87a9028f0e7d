"""The sampler of one process: versions that are handed to it, and its end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from launch.programs.sampler import LocalSampler, SamplerRecord
from rl_jax.dispatch import Dispatcher
from rl_jax.replay import events
from rl_jax.replay.log import read
from rl_jax.sampler.layout import make_layout
from rl_jax.sampler.programs import Programs
from rl_jax.sharding import param_shardings
from tests.fakes import tiny
from tests.fakes.parts import parts_in


@pytest.mark.parametrize("applied", [True, False])
def test_its_end_while_a_version_is_staged(tmp_path: Path, applied: bool) -> None:
    """A swap that never comes about is no fault of anybody. No step is run."""
    dispatcher = Dispatcher("sampler")
    parts, model = parts_in(tmp_path), tiny.model()
    layout = make_layout(model.cache_spec, data=1, tensor=1, sequences=4, max_context=64)
    unused: Any = None
    programs = Programs(layout, tiny.FEW, {}, unused, lambda: unused)

    async def main() -> None:
        record = SamplerRecord(parts, "sampler")
        shardings = param_shardings(model.axes(), tiny.mesh())
        async with asyncio.timeout(30), asyncio.TaskGroup() as background:
            own = LocalSampler(parts, programs, dispatcher, shardings, record, background)
            for version in (0, 1):
                await own.deliver(version, tiny.params(seed=version))
            if applied:
                await own.applied(1)
                assert own.engine.weights.version == 1
            own.end()
        await record.close()

    try:
        asyncio.run(main())
    finally:
        dispatcher.close()
    told = [entry.event for entry in read(tmp_path, "sampler")]
    assert not [e for e in told if isinstance(e, events.VersionApplied)], "no step under it"
