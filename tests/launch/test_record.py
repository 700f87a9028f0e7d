"""What the hooks of a run add up to, and that each event is in its program's journal."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launch.programs.base import Parts
from launch.record import OrchestratorRecord, TrainerRecord, within
from launch.resume import Rollouts
from rl_jax.dispatch import Dispatcher, Interval
from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.orchestrator.state import Discard, Resume
from rl_jax.replay import events
from rl_jax.replay.fates import Fate, Kind
from rl_jax.replay.log import merged
from rl_jax.replay.log import read as read_log
from rl_jax.replay.trajectory_log import read_groups, read_trajectories
from rl_jax.trajectories.types import copy_of
from tests.fakes.parts import Listening, parts_in
from tests.trajectories.build import group, same_group, trajectory

METRICS = {
    names.TRAINED_TOKENS: 40.0,
    names.TRAINED_TRAJECTORIES: 4.0,
    names.LAG_MAX: 1.0,
    names.REWARD: 0.5,
    names.LOSS: 0.25,
    names.GRAD_NORM: 2.0,
    names.WAIT_SECONDS: 0.5,
    names.STEP_SECONDS: 1.0,
    names.PUSH_SECONDS: 0.0,
}


def test_within_cuts_intervals_at_the_window() -> None:
    spans = [(0.0, 1.0), (2.0, 4.0), (5.0, 6.0), (7.0, 9.0)]
    assert within(spans, 3.0, 8.0) == [(3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]
    assert within(spans, 4.0, 5.0) == []
    assert within([], 0.0, 1.0) == []


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return parts_in(tmp_path)


@pytest.fixture
def dispatchers() -> Iterator[dict[str, Dispatcher]]:
    made = {name: Dispatcher(name) for name in ("trainer", "sampler")}
    yield made
    for dispatcher in made.values():
        dispatcher.close()


def test_a_trainer_of_two_updates(parts: Parts, dispatchers: dict[str, Dispatcher]) -> None:
    trained, dropped = group(1, 0), group(2, 0)
    padded = replace(dropped, members=(*dropped.members, copy_of(dropped.members[0])))

    async def main() -> None:
        record = TrainerRecord(parts)
        sampled = iter([100, 300, 700])
        await record.on_digest(0, "d0", 0)
        record.version = 0
        record.watch({names.QUEUE_DEPTH: lambda: 3}, dispatchers, lambda: next(sampled))
        for own in (trained, padded):
            await record.on_put(own)
        record.on_drop(padded, "stale")
        await record.on_batch(1, [trained], 0)
        await record.on_update(1, METRICS | {names.DLOGP_FRESH: 3e-6})
        await record.on_digest(1, "d1", 1)
        record.version = 1
        await record.on_update(2, METRICS | {names.LAG_MAX: 0.0})
        await record.close()

    asyncio.run(main())
    told = [entry.event for entry in read_log(parts.run_dir, "trainer")]
    first_id, second_id = events.group_id(trained), events.group_id(dropped)
    assert told == [
        events.VersionPublished(0, "d0", 0),
        events.GroupPut(first_id, 0, 6),
        events.GroupPut(second_id, 0, 6),
        events.GroupDropped(second_id, "stale"),
        events.BatchTaken(1, 0, (first_id,)),
        events.UpdateDone(1, 0.25, 2.0),
        events.VersionPublished(1, "d1", 1),
        events.UpdateDone(2, 0.25, 2.0),
    ]
    (one, its), (other, others) = read_groups(parts.run_dir)
    assert same_group(one, trained) and its == Fate(Kind.TRAINED, 1)
    assert same_group(other, padded) and others == Fate(Kind.DROPPED, reason="stale")

    first, second = read(parts.run_dir / "metrics.jsonl")
    assert (first[names.STEP], first[names.POLICY_VERSION]) == (1, 0)
    assert (second[names.STEP], second[names.POLICY_VERSION]) == (2, 1)
    assert (first[names.TRAINED_TOKENS], second[names.TRAINED_TOKENS]) == (40, 80)
    assert first[names.DROPPED] == 2, "copies are not trajectories of their own"
    assert first[names.OFFERED_LENGTH] == 3 and names.OFFERED_LENGTH not in second
    assert first[names.QUEUE_DEPTH] == 3 and first[names.DLOGP_FRESH] == 3e-6
    assert first[names.SAMPLER_TOKENS_PER_SECOND] > 0 and first[names.TRAINER_BUSY_SHARE] == 0
    assert isinstance(parts.reporter, Listening)
    assert [u[names.STEP] for u in parts.reporter.updates] == [1, 2]


def test_fates_that_were_not_sealed_are_told_again(parts: Parts) -> None:
    """A trainer was killed with one group trained on, one in a batch, one dropped, and one whose
    put was cut short."""
    trained, taken, old, cut = group(1), group(4), group(2), group(3)

    async def killed() -> None:
        record = TrainerRecord(parts)
        for own in (trained, taken, old):
            await record.on_put(own)
        await record.on_batch(1, [trained], 0)
        await record.on_update(1, METRICS)
        await record.on_batch(2, [taken], 0)
        record.on_drop(old, "stale")
        await record.trajectories.put(cut)
        record.trajectories.rotate = nothing
        await record.close()

    async def nothing() -> None:
        pass

    async def again() -> list[events.GroupId]:
        record = TrainerRecord(parts_in(parts.run_dir))
        still = list(record.trajectories.open_groups)
        await record.close()
        return still

    asyncio.run(killed())
    assert {fate.kind for _, fate in read_groups(parts.run_dir)} == {Kind.OPEN}
    assert asyncio.run(again()) == [events.group_id(taken), events.group_id(cut)]
    told = [entry.event for entry in read_log(parts.run_dir, "trainer")]
    assert told[-1] == events.GroupPut(events.group_id(cut), 0, 6), "now the journal knows"


def test_an_orchestrators_rollouts(parts: Parts) -> None:
    good, failed = trajectory(0, 1.0, prompt=6), trajectory(3, None, prompt=7, reason="tool: gone")
    spare, left = trajectory(1, 0.0, prompt=7), trajectory(2, 1.0, prompt=8)
    asked = trajectory(0, 1.0, prompt=0)
    lost = Rollouts(Resume(0, (), (), 0), (left.key._replace(sample=9),), frozenset())

    async def main() -> None:
        record = OrchestratorRecord(parts, lost)
        for own in (good, failed, spare):
            record.on_started(own.key)
            await record.on_rollout(own)
        record.on_lost(good.key._replace(sample=5), "sampler lost")
        await record.on_discard(Discard("lookup", 7, "1 of 4 rollouts valid", (spare,)))
        await record.on_left([left])
        await record.on_evaluated("before", 0, [asked], {"all": 1.0})
        await record.close()

    asyncio.run(main())
    told = [entry.event for entry in merged(parts.run_dir)]
    assert told == [
        events.RolloutLost(left.key._replace(sample=9), "the run stopped"),
        *(
            event
            for own in (good, failed, spare)
            for event in (
                events.RolloutStarted(own.key),
                events.RolloutDone(own.key, own.status.value, 2),
            )
        ),
        events.RolloutLost(good.key._replace(sample=5), "sampler lost"),
        events.GroupDiscarded(events.GroupId("lookup", 7), "1 of 4 rollouts valid"),
        events.Evaluated("before", 0, {"all": 1.0}),
    ]
    fates = {r.trajectory.key: r.fate for r in read_trajectories(parts.run_dir)}
    assert fates == {
        failed.key: Fate(Kind.FAILED, reason="tool: gone"),
        spare.key: Fate(Kind.DISCARDED, reason="1 of 4 rollouts valid"),
        left.key: Fate(Kind.OPEN, reason="the run ended"),
        asked.key: Fate(Kind.EVALUATED, 0),
    }, "the good one is its group's"
    assert isinstance(parts.reporter, Listening)
    assert parts.reporter.notes == ["group lookup 7 given up: 1 of 4 rollouts valid"]


def test_shares_are_of_the_time_since_the_last_update(
    parts: Parts, dispatchers: dict[str, Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window 10 to 14: the trainer busy 10 to 13, the sampler 12 to 14, 200 tokens sampled."""
    now = 10.0
    dispatchers["trainer"].busy += [Interval(8.0, 13.0)]
    dispatchers["sampler"].busy += [Interval(1.0, 2.0), Interval(12.0, 20.0)]
    sampled = iter([50, 250])

    async def main() -> None:
        nonlocal now
        record = TrainerRecord(parts)
        with monkeypatch.context() as patched:
            patched.setattr("launch.record.time.perf_counter", lambda: now)
            record.watch({}, dispatchers, lambda: next(sampled))
            now = 14.0
            await record.on_update(1, METRICS)
        await record.close()

    asyncio.run(main())
    for dispatcher in dispatchers.values():
        dispatcher.busy.clear()
    (line,) = read(parts.run_dir / "metrics.jsonl")
    assert line[names.TRAINER_BUSY_SHARE] == 0.75
    assert line[names.SAMPLER_BUSY_SHARE] == 0.5
    assert line[names.OVERLAP_SHARE] == 1 / 3
    assert line[names.SAMPLER_TOKENS_PER_SECOND] == 50.0


def test_the_end_of_a_rollout_is_on_disk_before_its_group_can_be_put(parts: Parts) -> None:
    """Or a kill right then leaves a group that was put by rollouts that never ended."""
    own = trajectory(2)

    async def main() -> None:
        record = OrchestratorRecord(parts)
        await record.on_rollout(own)
        # What another process reads now is what is left if this one is killed.
        told = [entry.event for entry in read_log(parts.run_dir, "orchestrator")]
        assert told == [events.RolloutDone(own.key, own.status.value, len(own.tokens))]
        await record.close()

    asyncio.run(main())
