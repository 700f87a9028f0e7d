"""Starts whole runs; what they compile is compiled once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch import build, local
from rl_jax.config.run import RunConfig
from rl_jax.tasks.base import TaskFamily
from tests.fakes.chatter import family
from tests.fakes.runs import Quiet, Run, once
from tests.fakes.tiny import random_params


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of `launch.build` that compile remember what they made, by what it hangs on."""
    step = once(build.compile_step, lambda model, loss, optimizer, mesh, shape: (mesh, shape))
    audit = once(build.compile_audit, lambda model, mesh, shape: (mesh, shape))
    sampler = once(
        build.compile_sampler,
        lambda config, model, mesh: (
            config.model_dump_json(include={"sampler", "seed"}, exclude={"sampler": {"on_push"}}),
            mesh,
        ),
    )
    monkeypatch.setattr(build, "init_params", random_params)
    monkeypatch.setattr(build, "compile_step", step)
    monkeypatch.setattr(build, "compile_audit", audit)
    monkeypatch.setattr(build, "compile_sampler", sampler)
    monkeypatch.setattr(local.picture, "can_draw", lambda: False)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """start(config, family, raises=...) -> Run: a whole run, in a new directory each time."""

    def run(
        own: RunConfig, task: TaskFamily | None = None, raises: type[BaseException] | None = None
    ) -> Run:
        monkeypatch.setattr(build, "build_task", lambda config: task or family())
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        quiet = Quiet()
        if raises is None:
            return Run(own, path, local.run_local(own, path, quiet), quiet.notes)
        with pytest.raises(raises) as caught:
            local.run_local(own, path, quiet)
        return Run(own, path, caught.value, quiet.notes)

    return run
