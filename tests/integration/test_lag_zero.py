"""With lag 0 the asynchronous machinery is the synchronous trainer, bit for bit."""

import asyncio
from itertools import chain
from typing import NamedTuple

import numpy as np

from launch import build
from launch.programs.base import rollout_limits
from rl_jax.advantages import Estimates, estimate
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.orchestrator.rollout import run_rollout
from rl_jax.replay import events
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.sharding import param_shardings
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.publisher import copy_tree, reshard
from rl_jax.trainer.batches import build_batch, with_advantages
from rl_jax.trajectories.groups import assemble
from rl_jax.trajectories.types import Group, RolloutKey
from tests.fakes.chatter import family
from tests.fakes.runs import config, trained_groups
from tests.integration.conftest import Start
from tests.trajectories.build import same_group


class Synchronous(NamedTuple):
    digests: list[str]
    """Of version 0 and of the parameters after each update."""
    batches: list[list[Group]]


async def synchronous(own: RunConfig, sampler: Dispatcher) -> Synchronous:
    """Sample a batch, train on it, take the new weights, and again. No queue, no orchestrator."""
    task = family()
    renderer = build.build_renderer(task)
    model = build.build_policy(own, renderer.vocab_size)
    meshes = build.build_meshes(own)
    shape, loss = build.rl_shape(own), build.build_loss(own)
    trainer = build.compile_step(model, loss, build.build_optimizer(own), meshes.trainer, shape)
    params = build.init_params(model, own.seed, meshes.trainer)
    state = trainer.init(params)
    shardings = param_shardings(model.axes(), meshes.sampler)

    def weights(version: int) -> Weights:
        return Weights(version, reshard(copy_tree(state.params["policy"]), shardings))

    def digest() -> str:
        return build_manifest(state.params["policy"], 0, 0, "").digest

    programs = build.compile_sampler(own, model, meshes.sampler)
    engine = Engine(weights(0), programs, sampler)
    loop = asyncio.create_task(engine.run())
    digests, batches, prompts = [digest()], [], task.order(own.seed)
    size, limits = own.trainer.group_size, rollout_limits(own, training=True)
    for update in range(1, own.trainer.updates + 1):
        groups: list[Group] = []
        for number in range((update - 1) * own.trainer.groups, update * own.trainer.groups):
            prompt = task.train.prompt(next(prompts))
            keys = [RolloutKey(task.train.name, number, sample) for sample in range(size)]
            rollouts = (
                run_rollout(task.train, prompt, key, engine, renderer, limits) for key in keys
            )
            group = assemble(task.train.name, number, await asyncio.gather(*rollouts), size).group
            assert group is not None
            groups.append(group)
        members = [m for g in groups for m in g.members]
        built = build_batch(members, loss.reduction, update - 1, shape)
        advantage = build.build_advantage(own)
        per_group = estimate(advantage, groups, [Estimates()] * len(groups))
        advantages, returns = (list(chain.from_iterable(arrays)) for arrays in per_group)
        batch = with_advantages(built.batch, built.places, advantages, returns)
        state, _ = trainer.step(state, batch)
        state = trainer.after_push(state)
        await engine.swap(weights(update))
        digests.append(digest())
        batches.append(groups)
    loop.cancel()
    await asyncio.wait([loop])
    return Synchronous(digests, batches)


def test_an_asynchronous_run_at_lag_0_equals_the_synchronous_trainer(start: Start) -> None:
    own = config(trainer={"push_every": 1}, rollout={"ahead": 0})
    run = start(own)
    dispatcher = Dispatcher("sampler")
    try:
        expected = asyncio.run(synchronous(own, dispatcher))
    finally:
        dispatcher.close()
    assert [e.digest for e in run.told(events.VersionPublished)] == expected.digests
    assert len(set(expected.digests)) == 4, "every update changed the parameters"
    for got, wanted in zip(trained_groups(run), expected.batches, strict=True):
        assert len(got) == len(wanted) == own.trainer.groups
        for one, other in zip(got, wanted, strict=True):
            assert all(
                np.array_equal(a.tokens, b.tokens)
                and a.behavior_logprobs.tobytes() == b.behavior_logprobs.tobytes()
                for a, b in zip(one.members, other.members, strict=True)
            )
            assert same_group(one, other), "segments, versions, rewards and all"
    rewards = [m.reward for batch in expected.batches for g in batch for m in g.members]
    assert 0 < np.mean(rewards) < 1, "there was something to learn"
    assert run.summary.max_lag == 0
