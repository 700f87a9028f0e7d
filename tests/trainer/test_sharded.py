"""Trainer and sampler on four devices each: the numbers of one device, by real collectives."""

import asyncio
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from launch import build
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.metrics import names
from rl_jax.sampler.programs import sampled_of
from rl_jax.sharding import ROWS, TENSOR, param_shardings
from rl_jax.snapshots.publisher import reshard
from rl_jax.trainer.batches import Batch, map_arrays
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import StepReport
from tests.trainer import sharded
from tests.trainer.sharded import CONFIG, collectives, distance

UPDATES = 3
PUSHES = (2, 3)


class Run(NamedTuple):
    start: Tree
    states: list[TrainState]
    """On the host, after each update, before a reset."""
    reports: list[StepReport]
    pushed: list[Tree]
    """On the sampler's mesh."""
    estimates: list[dict[str, np.ndarray]]
    """Ahead of each update."""


@cache
def run(data: int, tensor: int) -> Run:
    """Three updates of critic and policy and two pushes, the optimizer reset at both."""
    own = sharded.trainer(data, tensor)
    places = param_shardings(sharded.model().axes(), build.build_meshes(CONFIG).sampler)
    state = own.start()
    states, reports, pushed, estimates = [], [], [], []
    assert own.program.critic is not None and own.program.estimate is not None
    for update in range(1, UPDATES + 1):
        batch = sharded.batch(update)
        estimates.append(jax.device_get(own.program.estimate(state.params, batch)))
        state, _ = own.program.critic(state, batch)
        state, report = own.program.step(state, batch)
        states.append(jax.device_get(state))
        reports.append(jax.device_get(report))
        if update in PUSHES:
            pushed.append(reshard(state.params["policy"], places))
            state = own.program.after_push(state)
    return Run(jax.device_get(own.params), states, reports, pushed, estimates)


@pytest.mark.parametrize("optimised", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_initial_parameters_are_the_same_bits_on_every_mesh(optimised: bool) -> None:
    one, four = (jax.tree.leaves(sharded.params(n, n, optimised)) for n in (1, 2))
    for a, b in zip(one, four, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("update", range(UPDATES))
def test_sharded_updates_are_those_of_one_device(update: int) -> None:
    one, four = run(1, 1), run(2, 2)
    assert float(four.reports[update].loss) == pytest.approx(
        float(one.reports[update].loss), abs=1e-5
    )
    assert distance(four.states[update].params, one.states[update].params) < 1e-5
    assert distance(four.states[update].optimizer, one.states[update].optimizer) < 1e-5
    assert float(four.reports[update].grad_norm) == pytest.approx(
        float(one.reports[update].grad_norm), rel=1e-5
    )
    for name, mean in one.reports[update].metrics.items():
        other = four.reports[update].metrics[name]
        assert float(other.total) == pytest.approx(float(mean.total), rel=1e-4)
        assert other.count == mean.count


def test_the_updates_are_real() -> None:
    one = run(1, 1)
    assert distance(one.states[0].params["policy"], one.start) > 1e-4
    # While the head is zero the trunk has no gradient: it moves from the second update on.
    assert distance(one.states[1].params["critic"]["trunk"], one.start) > 1e-4
    masked = [m.total / m.count for m in (r.metrics[names.MASKED_SHARE] for r in one.reports)]
    assert all(0.2 < share < 0.8 for share in masked)


@pytest.mark.parametrize("update", range(UPDATES))
def test_sharded_estimates_are_those_of_one_device(update: int) -> None:
    one, four = run(1, 1).estimates[update], run(2, 2).estimates[update]
    mask = sharded.batch(update + 1).mask
    assert one.keys() == four.keys() == sharded.ESTIMATES
    for name in one:
        np.testing.assert_allclose(four[name], one[name], atol=1e-5)
        assert one[name][mask].any() or (name, update) == ("values", 0), "a new critic says 0"


@pytest.mark.parametrize("name", ["step", "critic", "estimate"])
def test_trainer_communicates(name: str) -> None:
    assert collectives(getattr(sharded.trainer(2, 2).program, name))["all-reduce"] > 0
    assert not collectives(getattr(sharded.trainer(1, 1).program, name))


@pytest.mark.parametrize("width", [1, 64])
def test_sampler_communicates(width: int) -> None:
    found = collectives(sharded.sampler().steps[width])
    assert found["all-reduce"] > 0
    assert found["all-gather"] > 0


def test_state_and_moments_stay_where_they_were_placed() -> None:
    own = sharded.trainer(2, 2)
    first = own.start()
    places = jax.tree.map(lambda leaf: leaf.sharding, first)
    params = jax.tree.map(lambda leaf: leaf.sharding.spec, first.params["policy"])
    cut = [spec for spec in jax.tree.leaves(params) if TENSOR in spec]
    assert len(cut) > 8
    critic = jax.tree.map(lambda leaf: leaf.sharding.spec, first.params["critic"])
    assert critic["trunk"] == params and not any(jax.tree.leaves(critic["head"]))
    state, _ = own.program.step(first, sharded.batch())
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == places
    state = own.program.after_push(state)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == places


@pytest.mark.parametrize("size", [(1, 1), (2, 2)])
def test_every_step_takes_the_state_it_is_given(size: tuple[int, int]) -> None:
    """Donated: the old weights are gone, those that the first state was made of are not."""
    own = sharded.trainer(*size)
    first = own.start()
    batch = sharded.batch()
    assert own.program.critic is not None
    second, _ = jax.block_until_ready(own.program.critic(first, batch))
    third, _ = jax.block_until_ready(own.program.step(second, batch))
    jax.block_until_ready(own.program.after_push(third))
    for old in (first, second, third):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(own.params))


def test_rows_of_a_batch_are_split_over_the_axes_of_rows() -> None:
    (_, batch), _ = sharded.trainer(2, 2).program.step.input_shardings
    assert batch.tokens.spec[1] == ROWS
    assert batch.count.is_fully_replicated


@pytest.mark.parametrize("push", range(len(PUSHES)))
def test_a_pushed_leaf_has_the_samplers_sharding_and_equal_bits(push: int) -> None:
    pushed = run(2, 2).pushed[push]
    trained = run(2, 2).states[PUSHES[push] - 1].params["policy"]
    mesh = build.build_meshes(CONFIG).sampler
    want = param_shardings(sharded.model().axes(), mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, pushed) == want
    for leaf, original in zip(jax.tree.leaves(pushed), jax.tree.leaves(trained), strict=True):
        assert leaf.sharding.device_set == set(jax.devices()[4:])
        assert np.asarray(leaf).tobytes() == original.tobytes()


def test_the_sampler_runs_pushed_weights() -> None:
    programs = sharded.sampler()
    pool = programs.make_pool()
    for pushed in run(2, 2).pushed:
        pool, sampled = programs.steps[1](pushed, pool, sharded.idle(programs))
        assert sampled_of(sampled).finite.all()


def spread_out(batch: Batch) -> Batch:
    """The same rows, each in a microbatch of its own beside an empty row."""
    assert batch.count == 1

    def moved(given: np.ndarray) -> np.ndarray:
        array = given.copy()
        array[1, 0], array[0, 1] = array[0, 1].copy(), array[1, 1].copy()
        return array

    return map_arrays(moved, batch)._replace(count=np.array(2, np.int32))


def test_two_rows_in_one_microbatch_or_in_two() -> None:
    own = sharded.trainer(1, 1)
    whole = sharded.small_batch()
    apart = spread_out(whole)
    a, one = own.program.step(own.start(), whole)
    b, two = own.program.step(own.start(), apart)
    assert float(two.loss) == pytest.approx(float(one.loss), rel=1e-6)
    assert distance(b.params, a.params) < 1e-6
    assert distance(b.optimizer, a.optimizer) < 1e-6


@pytest.mark.slow
def test_trainer_and_sampler_step_at_full_speed() -> None:
    """Both sharded, a thousand steps each, as fast as the default depth allows, in a minute."""
    steps = 1000
    trainer, programs = sharded.trainer(2, 2, optimised=True), sharded.sampler(optimised=True)
    inputs, batch = sharded.idle(programs), sharded.batch()
    places = programs.steps[1].input_shardings[0][0]

    async def train() -> int:
        state = trainer.start()
        with closing(Dispatcher("test")) as own:
            for _ in range(steps):
                state, _ = await own.launch(trainer.program.step, state, batch)
            await own.drain()
        return int(state.step)

    async def sample() -> bool:
        weights, pool = reshard(trainer.params, places), programs.make_pool()
        with closing(Dispatcher("test")) as own:
            for _ in range(steps):
                pool, sampled = await own.launch(programs.steps[1], weights, pool, inputs)
            await own.drain()
        return bool(sampled_of(sampled).finite.all())

    async def both() -> list[Any]:
        async with asyncio.timeout(60.0):
            return await asyncio.gather(train(), sample())

    assert asyncio.run(both()) == [steps, True]
