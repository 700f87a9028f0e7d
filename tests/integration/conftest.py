"""Starts whole runs; what they compile is compiled once a session."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import build, local
from launch.report.data import seconds_on_record
from rl_jax.config.load import resolved
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import write_format
from rl_jax.tasks.base import TaskFamily
from tests.fakes.chatter import family
from tests.fakes.compiling import quickly
from tests.fakes.runs import Quiet, Run, once
from tests.fakes.tiny import random_params


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The functions of `launch.build` that compile do so quickly and remember what they made, by
    what it hangs on."""
    loss = once(
        build.build_loss,
        lambda config: (
            config.loss,
            config.staleness.tau if config.staleness.when_stale == "mask" else None,
        ),
    )
    step = once(
        build.compile_step,
        lambda model, loss, optimizer, mesh, shape, *extras: (loss, mesh, shape, *extras),
    )
    critic = once(build.build_critic, lambda config: (config.critic,))
    audit = once(build.compile_audit, lambda model, mesh, *rest: (mesh, *rest))
    sampler = once(
        build.compile_sampler,
        lambda config, model, mesh: (
            config.model_dump_json(include={"sampler", "seed"}, exclude={"sampler": {"on_push"}}),
            mesh,
        ),
    )
    monkeypatch.setattr(build, "init_params", random_params)
    monkeypatch.setattr(build, "build_loss", loss)
    monkeypatch.setattr(build, "build_critic", critic)
    monkeypatch.setattr(build, "compile_step", step)
    monkeypatch.setattr(build, "compile_audit", audit)
    monkeypatch.setattr(build, "compile_sampler", sampler)
    with quickly():
        yield


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """start(config, family, raises=..., path=...) -> Run: a whole run, in a new directory each
    time, or going on in the one given."""

    def run(
        own: RunConfig,
        task: TaskFamily | None = None,
        raises: type[BaseException] | None = None,
        path: Path | None = None,
    ) -> Run:
        monkeypatch.setattr(build, "build_task", lambda config: task or family())
        path = path or new(own)
        quiet = Quiet()
        began = time.time() - seconds_on_record(path)
        if raises is None:
            local.run_local(own, path, quiet, began=began)
            return Run(own, path, None, quiet.notes)
        with pytest.raises(raises) as caught:
            local.run_local(own, path, quiet, began=began)
        return Run(own, path, caught.value, quiet.notes)

    def new(own: RunConfig) -> Path:
        """As the command leaves it before anything runs."""
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        (path / "config.toml").write_text(resolved(own))
        write_format(path)
        return path

    return run
