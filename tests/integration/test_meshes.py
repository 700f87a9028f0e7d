"""Trainer and sampler each on (data 2, tensor 2) of 8 devices, from prompts to pushed weights."""

from collections.abc import Callable, Iterable

import jax
import pytest

from launch import build
from launch.programs import sampler
from rl_jax.config.run import RunConfig
from rl_jax.replay import events
from rl_jax.sampler.engine import Engine
from rl_jax.sharding import param_shardings
from rl_jax.staleness import Admit, Decision, Take, lag
from rl_jax.trajectories.types import Group
from tests.fakes.runs import check_journal, config, trained_groups
from tests.integration.conftest import Start

SQUARE = {"data": 2, "tensor": 2}


def test_three_updates_and_two_pushes_on_8_devices(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = config(
        mesh={"trainer": SQUARE, "sampler": SQUARE},
        trainer={"push_every": 2},
        rollout={"ahead": 2.0, "in_flight": 12},
        staleness={"tau": 1},
    )
    engines: list[Engine] = []
    taken: list[int] = []

    class Kept(Engine):
        def __init__(self, *args, **keywords) -> None:
            super().__init__(*args, **keywords)
            engines.append(self)

    def watched(config: RunConfig, oldest: Callable[[], Iterable[int]]) -> Admit:
        policy = build_admit(config, oldest)

        def admit(group: Group, published: int) -> Decision:
            decision = policy(group, published)
            if isinstance(decision, Take):
                assert lag(group, published) <= 1
                taken.append(lag(group, published))
            return decision

        return admit

    build_admit = build.build_admit
    monkeypatch.setattr(sampler, "Engine", Kept)
    monkeypatch.setattr(build, "build_admit", watched)
    run = start(own)

    check_journal(run)
    assert [e.version for e in run.told(events.VersionPublished)] == [0, 1, 2]
    assert len(taken) >= 6
    trained = {v for b in trained_groups(run) for g in b for m in g.members for v in m.versions}
    assert {0} < trained - {-1} | {0, 1} == {0, 1}
    assert run.summary.max_dlogp_fresh is not None and run.summary.max_dlogp_fresh <= 1e-4

    (engine,) = engines
    model = build.build_policy(own, 64)
    meshes = build.build_meshes(own)
    wanted = param_shardings(model.axes(), meshes.sampler)
    same = jax.tree.map(
        lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim),
        engine.weights.params,
        wanted,
    )
    assert engine.weights.version == 2 and all(jax.tree.leaves(same))
    used = {device for leaf in jax.tree.leaves(engine.weights.params) for device in leaf.devices()}
    assert used == set(jax.devices()[4:])


def test_both_programs_are_really_cut(start: Start) -> None:
    """The programs that the run above compiled speak over the tensor axis."""
    own = config(mesh={"trainer": SQUARE, "sampler": SQUARE})
    model = build.build_policy(own, 64)
    meshes = build.build_meshes(own)
    loss, optimizer = build.build_loss(own), build.build_optimizer(own)
    step = build.compile_step(model, loss, optimizer, meshes.trainer, build.rl_shape(own)).step
    sampler = build.compile_sampler(own, model, meshes.sampler)
    for program in (step, *sampler.steps.values()):
        assert "all-reduce" in program.as_text()
