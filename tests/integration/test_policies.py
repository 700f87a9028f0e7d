"""Four ways to hold the staleness bound, each in a whole run with a group that is late."""

import asyncio

import pytest

from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.replay import events
from rl_jax.trajectories.types import Group, RolloutKey
from tests.fakes.chatter import answer, chatter, family, score
from tests.fakes.runs import Run, check_journal, config, trained_groups
from tests.integration.conftest import Start

TAU = 2


def with_straggler(start: Start, when_stale: str, until: int, **sections: dict) -> Run:
    """Two groups an update, a push each, a batch ahead. Group 0 has sampled under version 0 and
    hangs in its tools and verifiers until group `until` begins."""
    gate = asyncio.Event()

    async def opened(key: RolloutKey) -> None:
        if key.prompt >= until:
            gate.set()

    async def late_answer(key: RolloutKey, call: object) -> str:
        if key.prompt == 0:
            await gate.wait()
        return await answer(key, call)

    async def late_score(key: RolloutKey, messages: object) -> float:
        if key.prompt == 0:
            await gate.wait()
        return await score(key, messages)

    own = config(
        trainer={"updates": 8, "groups": 2},
        staleness={"tau": TAU, "when_stale": when_stale},
        rollout={"ahead": 1.0, "tool_deadline_s": 60.0},
        **sections,
    )
    task = chatter(on_open=opened, on_call=late_answer, on_score=late_score)
    run = start(own, family(task))
    check_journal(run)
    return run


def late(batches: list[list[Group]]) -> list[tuple[int, Group]]:
    """(update, group) where group 0 was trained on."""
    found = [(step, g) for step, batch in enumerate(batches, 1) for g in batch]
    return [(step, g) for step, g in found if g.prompt == 0]


def test_drop_loses_what_is_too_old(start: Start) -> None:
    """When group 12 begins, at least four updates are done and as many versions out."""
    run = with_straggler(start, "drop", 12)
    (dropped,) = run.told(events.GroupDropped)
    assert dropped.group.prompt == 0 and dropped.reason.endswith(f"above {TAU}")
    assert late(trained_groups(run)) == []
    assert run.summary.max_lag <= TAU


def test_mask_takes_it_and_trains_on_nothing_too_old(start: Start) -> None:
    run = with_straggler(start, "mask", 12)
    assert run.summary.dropped == 0
    ((step, group),) = late(trained_groups(run))
    lines = read(run.path / "metrics.jsonl")
    for line, batch, taken in zip(
        lines, trained_groups(run), run.told(events.BatchTaken), strict=True
    ):
        lags = [
            taken.published_version - int(version)
            for g in batch
            for m in g.members
            for version in m.versions[m.loss_mask]
        ]
        stale = sum(lag > TAU for lag in lags) / len(lags)
        assert line[names.STALE_SHARE] == pytest.approx(stale)
        assert line[names.LAG_MAX] == max(lags)
    assert group.oldest_version == 0 and lines[step - 1][names.STALE_SHARE] > 0


def test_wait_holds_the_trainer_for_it(start: Start) -> None:
    run = with_straggler(start, "wait", 7, sampler={"on_push": "drain"})
    assert run.summary.dropped == 0
    ((step, _),) = late(trained_groups(run))
    assert step <= TAU + 1 and run.summary.max_lag <= TAU


def test_pace_starts_nothing_that_could_become_too_old(start: Start) -> None:
    """With a group of version 0 there, six may start: three updates, before which 2 is out."""
    run = with_straggler(start, "pace", 5, sampler={"on_push": "keep"})
    assert run.summary.dropped == 0
    ((step, _),) = late(trained_groups(run))
    assert step <= TAU + 1 and run.summary.max_lag <= TAU


def test_over_sampled_stragglers_are_cancelled_with_their_batch(start: Start) -> None:
    """Groups 0 and 5 never come back from their tools and verifiers; nobody waits for them."""

    async def never(key: RolloutKey, call: object) -> str:
        return await (asyncio.Future() if key.prompt in (0, 5) else answer(key, call))

    async def no_score(key: RolloutKey, messages: object) -> float:
        if key.prompt in (0, 5):
            await asyncio.Future()
        return await score(key, messages)

    own = config(
        trainer={"updates": 4, "groups": 2},
        rollout={"ahead": 0.0, "over_sample": 0.5, "tool_deadline_s": 60.0},
    )
    run = start(own, family(chatter(on_call=never, on_score=no_score)))
    check_journal(run)
    assert [len(batch) for batch in trained_groups(run)] == [2] * 4
    assert not {0, 5} & {g.prompt for batch in trained_groups(run) for g in batch}
    assert {f"group chatter {prompt} given up: over-sampled" for prompt in (0, 5)} <= {*run.notes}
