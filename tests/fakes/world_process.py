"""One process of a trainer's world: `python -m tests.fakes.world_process '{"role": ..., ...}'`.

Role `train`: three updates of a tiny policy with groups that process 0 alone has; it saves what
came out. Role `spin`: updates without training until a stop is requested; says "spinning" once.
"""

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np

from launch import build
from rl_jax.advantages import VALUES, Estimates, estimate
from rl_jax.dispatch import Dispatcher
from rl_jax.losses import recipes
from rl_jax.sharding import make_mesh
from rl_jax.trainer.batches import Batch, build_batch, with_advantages
from rl_jax.trainer.placement import gather, place
from rl_jax.trainer.state import adam
from rl_jax.trainer.world import Taken, World, shared_take, stop_requested
from rl_jax.trajectories.types import Group
from tests.fakes import tiny
from tests.trainer.build import random_trajectories
from tests.trainer.sharded import CONFIG, SHAPE

UPDATES = 3
PROMPTS = 3


def groups_of(update: int) -> list[Group]:
    """Two rollouts of each prompt, one rewarded."""
    own = random_trajectories([120, 90, 64, 60, 40, 30], tiny.VOCAB, seed=update, spread=1.5)
    groups = []
    for prompt in range(PROMPTS):
        members = tuple(
            replace(
                member,
                key=member.key._replace(prompt=prompt, sample=sample),
                reward=float(sample + prompt == 1),
            )
            for sample, member in enumerate(own[2 * prompt : 2 * prompt + 2])
        )
        groups.append(Group("lookup", prompt, members))
    return groups


async def take(update: int) -> Taken | None:
    return Taken(groups_of(update), 2) if update <= UPDATES else None


async def refuse(update: int) -> Taken | None:
    raise AssertionError("only process 0 takes")


def built(taken: Taken) -> Batch:
    members = [member for group in taken.groups for member in group.members]
    advantage, loss = build.build_advantage(CONFIG), build.build_loss(CONFIG)
    built = build_batch(members, loss.reduction, taken.published_version, SHAPE)
    per_group = estimate(advantage, taken.groups, [Estimates()] * len(taken.groups))
    advantages, returns = (list(chain.from_iterable(arrays)) for arrays in per_group)
    return with_advantages(built.batch, built.places, advantages, returns)


async def train(world: World, out: str) -> None:
    """Final state, every report of critic and policy, the critic's values, and a batch that went
    there and back, by name."""
    mesh = make_mesh(jax.devices(), 2, 1)
    loss, optimizer = build.build_loss(CONFIG), build.build_optimizer(CONFIG)
    model, critic = tiny.model(("mla",)), build.Critic(recipes.critic(), adam(1e-2))
    program = build.compile_step(model, loss, optimizer, mesh, SHAPE, critic, frozenset({VALUES}))
    assert program.critic is not None and program.estimate is not None
    state = program.init(tiny.random_params(model, 0, mesh))
    reports: list[Any] = []
    values: list[Any] = []
    batch: Any = None
    mine = take if world.process_id == 0 else refuse
    with closing(Dispatcher("test")) as dispatcher:
        while taken := await shared_take(world, mine, len(values) + 1, deadline_s=30.0):
            batch = built(taken)
            found = await dispatcher.run(program.estimate, state.params, place(batch, mesh))
            values.append(jax.device_get(found[VALUES]))
            # Advantages are made on the host, of what every process has whole.
            batch = place(batch._replace(returns=batch.advantages - values[-1]), mesh)
            state, report = await dispatcher.run(program.critic, state, batch)
            reports.append(jax.device_get(report))
            state, report = await dispatcher.run(program.step, state, batch)
            reports.append(jax.device_get(report))
        results = {"params": state.params, "optimizer": state.optimizer, "step": state.step}
        host = await dispatcher.run(gather, results)
        back = await dispatcher.run(gather, batch) if world.size > 1 else batch
    if host is not None:
        save(out, {"state": host, "reports": reports, "values": values, "batch": back})


def save(out: str, tree: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


async def spin(world: World) -> None:
    """Prints the update at which every process was told to stop."""
    taken = Taken(groups_of(1)[:1], 0)

    async def same(update: int) -> Taken | None:
        return taken

    update = 1
    while not stop_requested(update):
        assert await shared_take(world, same, update, deadline_s=30.0)
        update += 1
        if update == 3:
            print("spinning", flush=True)
    print(f"stopped at {update}", flush=True)


async def main(options: dict[str, Any]) -> None:
    role, out = options.pop("role"), options.pop("out", "")
    joined: partial[AbstractAsyncContextManager[World]]
    joined = partial(World.join, **options) if options else partial(nullcontext, World.single())
    async with joined() as world:
        await (spin(world) if role == "spin" else train(world, out))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
