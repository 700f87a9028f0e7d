"""One process of a world that trains: `python -m tests.fakes.world_training '{"out": ...}'`.

Three updates of a tiny policy with groups that process 0 alone has; it saves what came out, and
what it reads back of what both wrote.
"""

import asyncio
import sys
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launch import build
from rl_jax.advantages import VALUES, Estimates, estimate
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.losses import recipes
from rl_jax.sharding import make_mesh
from rl_jax.snapshots.manifest import Manifest, tree_digest
from rl_jax.snapshots.shared import describe_shared, save_shared
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.batches import Batch, build_batch, with_advantages
from rl_jax.trainer.placement import gather, place
from rl_jax.trainer.state import adam
from rl_jax.trainer.world import Taken, World, hear, shared_take, tell
from rl_jax.trajectories.types import Group
from tests.fakes import tiny
from tests.fakes.world_process import main
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
            found = await dispatcher.run(program.estimate, state.params, batch)
            values.append(jax.device_get(found[VALUES]))
            # Advantages are made on the host, of what every process has whole.
            batch = batch._replace(returns=batch.advantages - values[-1])
            state, report = await dispatcher.run(program.critic, state, batch)
            reports.append(jax.device_get(report))
            state, report = await dispatcher.run(program.step, state, batch)
            reports.append(jax.device_get(report))
        results = {"params": state.params, "optimizer": state.optimizer, "step": state.step}
        host = await dispatcher.run(gather, results)
        loaded = await dispatcher.run(gather, await written(world, dispatcher, results, out))
        back = await dispatcher.run(gather, place(batch, mesh)) if world.size > 1 else batch
    if host is not None:
        found = {"state": host, "loaded": loaded, "reports": reports, "values": values}
        save(out, found | {"batch": back})


async def written(world: World, dispatcher: Dispatcher, tree: Tree, out: str) -> Tree:
    """The tree, read from a version that all processes wrote beside the file `out`."""
    store = SnapshotStore(Path(out).with_suffix(""))
    leaves = await dispatcher.run(describe_shared, tree)
    if world.process_id == 0:
        store.clear(0)
        await tell(world, b"cleared")
    else:
        await hear(world, deadline_s=30.0)
    await dispatcher.run(save_shared, store.weights(0), tree)
    if world.process_id == 0:
        manifest = Manifest(0, 0, tree_digest(leaves), "", leaves)
        store.seal(manifest)
        store.commit(manifest)
        await tell(world, b"committed")
    else:
        await hear(world, deadline_s=30.0)
    return await asyncio.to_thread(store.load, 0, tree)


def save(out: str, tree: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], train))
