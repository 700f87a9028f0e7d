"""Experts from the sampler's step to the trainer's: recorded, kept, replayed."""

import asyncio
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from launch import build
from rl_jax.gateway.session import Session
from rl_jax.losses.recipes import dis
from rl_jax.metrics import names
from rl_jax.metrics.writers import read as read_metrics
from rl_jax.sampler.engine import Engine
from rl_jax.trainer.batches import Batch, Shape, build_batch, with_advantages
from rl_jax.trainer.scores import token_logprobs
from rl_jax.trainer.step import Experts, make_train_step
from rl_jax.trajectories import codec
from rl_jax.trajectories.types import Group, RolloutKey, Status, Trajectory
from tests.fakes import tiny
from tests.fakes.compiling import QUICK
from tests.fakes.engine import Stepped, prompt, run
from tests.fakes.runs import check_journal, config, replayed, trained_groups
from tests.integration.conftest import Start
from tests.losses.terms import numbers
from tests.trainer.build import start as first_state

SHAPE = Shape(1, 2, 128)
MODEL = {
    "feed_forward": ["experts", "experts"], "experts": 6, "chosen_experts": 2,
    "expert_width": 16, "shared_experts": 1,
}  # fmt: skip


@cache
def members() -> tuple[Trajectory, ...]:
    """Three conversations of two turns, as they come out of a record."""

    async def one(engine: Engine, number: int) -> Trajectory:
        own = RolloutKey("t", 0, number)
        async with Session(
            engine, own, temperature=1.0, stop_ids=frozenset(), training=True
        ) as session:
            for turn in range(2):
                session.append(list(prompt(10 * number + turn, 8 + number)))
                await session.generate(5)
            return session.trajectory(Status.COMPLETED, 1.0, turns=2)

    async def main(engine: Engine, steps: Stepped) -> list[Trajectory]:
        return await asyncio.gather(*(one(engine, number) for number in range(3)))

    programs = tiny.compiled(tiny.ROUTED, tiny.FEW, sequences=4, max_context=64).programs
    sampled = run(main, programs=programs, weights=tiny.weights(0, tiny.ROUTED))
    return codec.unpack_group(codec.pack_group(Group("t", 0, tuple(sampled)))).members


@cache
def batch() -> Batch:
    loss = dis()
    built = build_batch(members(), loss.reduction, 0, SHAPE, (2, 2))
    ones = [np.ones(len(m.tokens), np.float32) for m in members()]
    return with_advantages(built.batch, built.places, ones, ones)


def rows() -> tuple[Any, ...]:
    own = batch()
    return tuple(a[0] for a in (own.tokens, own.positions, own.segment_ids, own.temperature))


@cache
def forward() -> Any:
    routing = tiny.model(tiny.ROUTED).routing
    assert routing is not None
    return jax.jit(lambda *arguments: routing.forward(*arguments)[1], compiler_options=QUICK)


def own_choices(version: int, replayed: np.ndarray | None = None) -> np.ndarray:
    """[R, L, M, k] of the trainer's router, of what the layers before it made."""
    arrays = *rows()[:3], np.full((*SHAPE[1:], 2, 2), -1) if replayed is None else replayed
    return np.asarray(forward()(tiny.params(tiny.ROUTED, version), *arrays))


def test_what_the_sampler_recorded_is_in_the_batch_token_by_token() -> None:
    recorded = batch().choices
    assert recorded is not None
    known = (recorded[0] >= 0).all((-1, -2))
    lengths = [len(m.tokens) for m in members()]
    assert known.sum() == sum(lengths) - 3, "all but the last tokens"
    want, given = np.sort(own_choices(0), -1), np.sort(recorded[0], -1)
    np.testing.assert_array_equal(given[known], want[known])


@cache
def scored(replay: bool) -> Any:
    model = tiny.model(tiny.ROUTED)

    def score(params: Any, choices: Any, *arrays: Any) -> Any:
        used = choices if replay else None
        return token_logprobs(model, params, *arrays, vocab_chunk=16, choices=used)

    return jax.jit(score, compiler_options=QUICK)


def test_under_the_weights_that_sampled_replay_changes_nothing() -> None:
    params, own = tiny.params(tiny.ROUTED), batch()
    for replay in (True, False):
        scores = np.asarray(scored(replay)(params, own.choices[0], *rows()))
        np.testing.assert_allclose(scores[own.mask[0]], own.behavior[0][own.mask[0]], atol=2e-5)


@cache
def stepped() -> Any:
    """One update of other weights, with weight decay, experts replayed: (before, after, report)."""
    own = config(model=MODEL, trainer={"weight_decay": 0.5})
    model, loss, optimizer = tiny.model(tiny.ROUTED), dis(), build.build_optimizer(own)
    how = {"vocab_chunk": 16, "experts": Experts(replay=True)}
    step = make_train_step(model, loss, {"policy": optimizer}, **how)
    step = jax.jit(step, compiler_options=QUICK)
    params = tiny.params(tiny.ROUTED, 1)
    state = first_state(loss, optimizer, params)
    after, report = step(state, batch())
    return params, after.params["policy"], report


def test_under_other_weights_the_sampler_s_experts_are_used() -> None:
    """The metric by hand, and scores that are those of the recorded experts alone."""
    recorded = batch().choices[0]
    own = own_choices(1, recorded)
    known = recorded >= 0
    same = (recorded[..., :, None] == own[..., None, :]).any(-1)
    share = (known & ~same).sum() / known.sum()
    assert 0.1 < share < 0.9
    said = numbers(stepped()[2].metrics)[names.ROUTER_DIFFERING_SHARE]
    assert said == pytest.approx(share, rel=1e-6)
    params, mask = tiny.params(tiny.ROUTED, 1), batch().mask[0]
    replayed, plain = (np.asarray(scored(r)(params, recorded, *rows())) for r in (True, False))
    assert np.abs(replayed - plain)[mask].max() > 1e-2


def test_nothing_but_the_balance_moves_a_routers_bias() -> None:
    before, after, report = stepped()
    assert np.isfinite(report.loss)
    for name, block in before["blocks"].items():
        moved = after["blocks"][name]["ffn"]
        np.testing.assert_array_equal(moved["router_bias"], block["ffn"]["router_bias"])
        assert np.abs(moved["router"] - block["ffn"]["router"]).max() > 1e-4


@pytest.mark.slow
def test_a_run_with_experts_records_replays_and_is_done_again(start: Start) -> None:
    """At lag 0 the trainer's router chooses what the sampler's did."""
    own = config(
        model=MODEL,
        trainer={"router_bias_rate": 1e-3, "replay_choices": True, "updates": 3},
        sampler={"record_choices": True},
        rollout={"ahead": 0},
    )
    run = start(own)
    check_journal(run)
    for group in (g for groups in trained_groups(run) for g in groups):
        for member in group.members:
            assert member.choices is not None
            assert member.choices.shape == (len(member.tokens) - 1, 2, 2)
    lines = read_metrics(run.path / "metrics.jsonl")
    assert len(lines) == 3
    for line in lines:
        assert line[names.ROUTER_DIFFERING_SHARE] == 0.0
        assert line[names.DLOGP_FRESH] < 1e-4
    done = replayed(run)
    assert (done.updates, done.versions, done.first_difference) == (3, 4, "")
