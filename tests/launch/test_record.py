"""What the hooks of a run add up to, and that each event is in the journal."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.record import Record, within
from rl_jax.dispatch import Dispatcher, Interval
from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.orchestrator.state import Discard
from rl_jax.replay import events, journal
from rl_jax.trajectories.types import copy_of
from tests.fakes.runs import Quiet
from tests.trajectories.build import group, same_group, trajectory

METRICS = {
    names.TRAINED_TOKENS: 40.0,
    names.TRAINED_TRAJECTORIES: 4.0,
    names.LAG_MAX: 1.0,
    names.REWARD: 0.5,
}


def test_within_cuts_intervals_at_the_window() -> None:
    spans = [(0.0, 1.0), (2.0, 4.0), (5.0, 6.0), (7.0, 9.0)]
    assert within(spans, 3.0, 8.0) == [(3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]
    assert within(spans, 4.0, 5.0) == []
    assert within([], 0.0, 1.0) == []


class Listening(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Mapping[str, Any]] = []

    def update(self, metrics: Mapping[str, Any]) -> None:
        self.updates.append(metrics)


@pytest.fixture
def dispatchers():
    made = Dispatcher("trainer"), Dispatcher("sampler")
    yield made
    for dispatcher in made:
        dispatcher.close()


def test_a_run_of_two_updates(tmp_path: Path, dispatchers: tuple[Dispatcher, Dispatcher]) -> None:
    trained, dropped = group(1, 0), group(2, 0)
    failed = trajectory(3, None, prompt=7, reason="tool: gone")
    reporter = Listening()

    async def main() -> Record:
        log = journal.create(tmp_path / "journal")
        record = Record(tmp_path, log, reporter, *dispatchers, began=0.0)
        sampled = iter([100, 300, 700])
        await record.on_digest(0, "d0")
        record.version = 0
        record.watch({names.QUEUE_DEPTH: lambda: 3}, lambda: next(sampled))
        for own in (trained, dropped):
            await record.on_put(own)
        await record.on_rollout(trained.members[0])
        await record.on_rollout(failed)
        padded = dropped.members[0]
        record.on_drop(replace(dropped, members=(*dropped.members, copy_of(padded))), "stale")
        await record.on_discard(Discard("lookup", 7, "1 of 4 rollouts valid: tool: gone", 1))
        await record.on_batch(1, [trained])
        await record.on_update(1, METRICS | {names.DLOGP_FRESH: 3e-6})
        await record.on_batch(2, [trained])
        await record.on_digest(1, "d1")
        record.version = 1
        await record.on_update(2, METRICS | {names.LAG_MAX: 0.0, names.DLOGP_FRESH: 1e-6})
        record.close()
        await log.close()
        return record

    record = asyncio.run(main())
    assert (record.version, record.max_lag, record.max_dlogp_fresh) == (1, 1, 3e-6)
    assert record.counts["dropped"] == 2 + 1, "copies are not trajectories of their own"
    assert reporter.notes == ["group lookup 7 given up: 1 of 4 rollouts valid: tool: gone"]

    told = [events.decode(e) for e in journal.read(tmp_path / "journal")]
    assert [type(e).kind for e in told] == [
        "version_published", "group_put", "group_put", "rollout_failed", "group_dropped",
        "batch_taken", "update_done", "batch_taken", "version_published", "update_done",
    ]  # fmt: skip
    assert told[0] == events.VersionPublished(0, "d0", 0)
    assert isinstance(told[1], events.GroupPut) and same_group(told[1].group, trained)
    assert told[3] == events.RolloutFailed(failed.key, "tool: gone")
    assert told[5] == events.BatchTaken(1, 0, (events.group_id(trained),))
    assert told[8] == events.VersionPublished(1, "d1", 2), "after the update it is made of"

    first, second = read(tmp_path / "metrics.jsonl")
    assert (first[names.STEP], first[names.POLICY_VERSION]) == (1, 0)
    assert (second[names.STEP], second[names.POLICY_VERSION]) == (2, 1)
    assert (first[names.TRAINED_TOKENS], second[names.TRAINED_TOKENS]) == (40, 80)
    assert first[names.DROPPED] == 3 and first[names.FAILED] == 1
    assert first[names.OFFERED_LENGTH] == (3 + 2) / 2, "failed ones were offered too"
    assert names.OFFERED_LENGTH not in second
    assert first[names.QUEUE_DEPTH] == 3
    assert first[names.SAMPLER_TOKENS_PER_SECOND] > 0
    assert first[names.TRAINER_BUSY_SHARE] == 0
    assert [u[names.STEP] for u in reporter.updates] == [1, 2]


def test_shares_are_of_the_time_since_the_last_update(
    tmp_path: Path, dispatchers: tuple[Dispatcher, Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window 10 to 14: the trainer busy 10 to 13, the sampler 12 to 14, 200 tokens sampled."""
    now = 10.0
    monkeypatch.setattr("launch.record.time.perf_counter", lambda: now)
    trainer, sampler = dispatchers
    trainer.busy += [Interval(8.0, 13.0)]
    sampler.busy += [Interval(1.0, 2.0), Interval(12.0, 20.0)]
    sampled = iter([50, 250])

    async def main() -> None:
        nonlocal now
        log = journal.create(tmp_path / "journal")
        record = Record(tmp_path, log, Quiet(), trainer, sampler, began=0.0)
        record.watch({}, lambda: next(sampled))
        now = 14.0
        await record.on_update(1, METRICS)
        record.close()
        await log.close()

    asyncio.run(main())
    trainer.busy.clear()
    sampler.busy.clear()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line[names.TRAINER_BUSY_SHARE] == 0.75
    assert line[names.SAMPLER_BUSY_SHARE] == 0.5
    assert line[names.OVERLAP_SHARE] == 1 / 3
    assert line[names.SAMPLER_TOKENS_PER_SECOND] == 50.0
    assert line[names.WALL_SECONDS] == 14.0
