"""[N] The report's numbers, each against values worked out by hand."""

import numpy as np
import pytest

from launch.report import numbers
from launch.report.numbers import FateLine, HeldOut, LabelShare, Row, Version
from rl_jax.metrics import names
from rl_jax.replay.events import (
    BatchTaken,
    Evaluated,
    GroupDropped,
    GroupId,
    RunEnded,
    RunStarted,
    UpdateDone,
    VersionApplied,
    VersionPublished,
)
from rl_jax.replay.fates import Fate, Kind, Recorded
from rl_jax.trajectories.types import RolloutKey, Status
from tests.trajectories.build import trajectory

TRAINED_1, TRAINED_2 = Fate(Kind.TRAINED, 1), Fate(Kind.TRAINED, 2)


def row(
    fate: Fate,
    length: int = 10,
    versions: dict[int, int] | None = None,
    label: str = "a",
    reward: float | None = 1.0,
) -> Row:
    status = Status.FAILED if reward is None else Status.COMPLETED
    key = RolloutKey("t", 0, 0)
    return Row(key, fate, label, status, reward, length, versions or {0: length})


def line(step: int, wall: float, version: int = 0, **more: float | None) -> dict[str, object]:
    return {names.STEP: step, names.POLICY_VERSION: version, names.WALL_SECONDS: wall, **more}


def test_row_counts_sampled_tokens_by_version():
    recorded = Recorded(trajectory(2, 0.5, (3, 3, 4), prompt=7), TRAINED_1, "trainer")
    got = numbers.row(recorded, "x")
    assert (got.length, got.versions, got.sampled) == (4, {3: 2, 4: 1}, 3)
    assert (got.key, got.reward, got.label) == (RolloutKey("lookup", 7, 2, 0), 0.5, "x")


@pytest.mark.parametrize(
    ("told", "running", "state"),
    [
        ([], False, "killed"),
        ([RunStarted(0, "", 0)], False, "killed"),
        ([RunStarted(0, "", 0)], True, "running"),
        ([RunStarted(0, "", 0), RunEnded("stopped")], False, "stopped"),
        ([RunStarted(0, "", 0), RunEnded("stopped"), RunStarted(0, "", 3)], False, "killed"),
        ([RunEnded("stopped"), RunStarted(0, "", 3), RunEnded("finished")], False, "finished"),
        ([RunStarted(0, "", 0), RunEnded("finished")], True, "finished"),
        ([RunStarted(0, "", 0), RunEnded("stopped")], True, "running"),
        ([RunEnded("finished"), RunStarted(0, "", 3)], True, "running"),
    ],
)
def test_state_is_what_the_last_start_came_to(told, running, state):
    assert numbers.state(told, running=running) == state


def test_series_skips_lines_without_the_metric():
    steps, values = numbers.series([line(1, 0, x=2.0), line(2, 0), line(3, 0, x=None)], "x")
    assert steps.tolist() == [1] and values.tolist() == [2]


def test_smooth():
    np.testing.assert_allclose(numbers.smooth(np.array([1.0, 0.0, 1.0]), 0.5), [1, 0.5, 0.75])
    assert not len(numbers.smooth(np.array([])))


def test_blocks_are_means_of_equal_runs():
    got = numbers.blocks(np.array([1.0, 3.0, np.nan, 4.0, 7.0]), 3)
    np.testing.assert_array_equal(got, [2, 4, 7])
    np.testing.assert_array_equal(numbers.blocks(np.array([1.0, 2.0]), 3), [1, 2])
    assert np.isnan(numbers.blocks(np.array([np.nan, np.nan, 1.0, 1.0]), 2)[0])
    assert not len(numbers.blocks(np.array([]), 3))


def test_clocks_place_an_update_on_each():
    lines = [line(2, 10.0, trained_tokens=100), line(4, 30.0, trained_tokens=300), line(5, 31.0)]
    clocks = numbers.clocks(lines)
    assert clocks.at(0) == (0, 0, 10.0)
    assert clocks.at(1) == (1, 50, 10.0)
    assert clocks.at(3) == (3, 200, 20.0)
    assert clocks.at(4) == (4, 300, 30.0)
    assert clocks.at(5) == (5, 300, 31.0), "tokens are those of the line before"
    assert numbers.clocks([]).at(4) == (4, 0, 0)


def test_held_out_lie_where_their_version_was_published():
    told = [
        VersionPublished(0, "", 0),
        Evaluated("before", 0, {"all": 0.5, "hops=1": 0.75}),
        VersionPublished(1, "", 8),
        Evaluated("after", 1, {"all": 0.875}),
    ]
    assert numbers.held_out(told) == [
        HeldOut(0, 0, 0.5, {"hops=1": 0.75}),
        HeldOut(1, 8, 0.875, {}),
    ]


def test_lag_is_from_the_version_published_when_the_batch_was_taken():
    told = [BatchTaken(1, 2, ()), BatchTaken(2, 3, ())]
    rows = [
        row(TRAINED_1, versions={1: 4, 2: 6}),
        row(TRAINED_2, versions={2: 5, 1: 1}),
        row(Fate(Kind.DROPPED, reason="old"), versions={0: 99}),
        row(Fate(Kind.EVALUATED, 2), versions={2: 99}),
    ]
    assert numbers.lag_tokens(rows, told) == {0: 6, 1: 4 + 5, 2: 1}
    assert list(numbers.lag_tokens(rows, told)) == [0, 1, 2]
    assert numbers.lag_tokens(rows, []) == {}


OFFERED = [
    row(TRAINED_1, 10, label="b"),
    row(TRAINED_2, 20),
    row(Fate(Kind.DROPPED), 60),
    row(Fate(Kind.DISCARDED), 40),
    row(Fate(Kind.OPEN), 20, label="b"),
]
NOT_OFFERED = [
    row(Fate(Kind.FAILED), 1000, reward=None),
    row(Fate(Kind.DISCARDED), 1000, reward=None),
    row(Fate(Kind.EVALUATED, 0), 1000, label="c"),
]


def test_trained_against_offered_lengths():
    lengths = numbers.lengths([*OFFERED, *NOT_OFFERED])
    assert sorted(lengths.offered) == [10, 20, 20, 40, 60] and sorted(lengths.trained) == [10, 20]
    assert lengths.means == (15.0, 30.0)
    assert lengths.difference == -0.5
    assert np.isnan(numbers.lengths(NOT_OFFERED).means).all()


def test_trained_against_offered_labels():
    assert numbers.label_shares([*OFFERED, *NOT_OFFERED]) == [
        LabelShare("a", 0.5, 0.6),
        LabelShare("b", 0.5, 0.4),
    ]
    assert numbers.label_shares([]) == []


def test_fates_by_kind_and_reason_without_its_numbers():
    rows = [
        row(Fate(Kind.OPEN), 1),
        row(Fate(Kind.DROPPED, reason="3 pushes old"), 10, versions={0: 4}),
        row(Fate(Kind.DROPPED, reason="12 pushes old"), 10, versions={0: 5}),
        row(Fate(Kind.DROPPED, reason="no answer after 0.5 s"), 100),
        row(TRAINED_1, 7),
        row(TRAINED_2, 7),
    ]
    assert numbers.fates(rows) == [
        FateLine(Kind.TRAINED, "", 2, 14),
        FateLine(Kind.DROPPED, "no answer after N s", 1, 100),
        FateLine(Kind.DROPPED, "N pushes old", 2, 9),
        FateLine(Kind.OPEN, "", 1, 1),
    ]


def test_waits_and_what_is_left_of_the_time():
    lines = [
        line(1, 100.0, wait_seconds=1.0, step_seconds=2.0),
        line(2, 104.0, wait_seconds=0.5, step_seconds=2.0, push_seconds=1.0),
        line(3, 105.0, step_seconds=1.5),
    ]
    waits = numbers.waits(lines)
    assert waits.wait.tolist() == [1, 0.5, 0] and waits.step.tolist() == [2, 2, 1.5]
    assert waits.push.tolist() == [0, 1, 0]
    assert waits.rest.tolist() == [0, 0.5, 0], "no time before the first, never negative"
    total = 1.5 + 5.5 + 1 + 0.5
    assert waits.shares == pytest.approx(
        {"wait": 1.5 / total, "step": 5.5 / total, "push": 1 / total, "rest": 0.5 / total}
    )
    assert set(numbers.waits([]).shares.values()) == {0.0}


def test_tokens_trained_per_second():
    lines = [line(1, 10.0, trained_tokens=50), line(2, 14.0, trained_tokens=250)]
    updates, rate = numbers.trained_per_second(lines)
    assert (updates.tolist(), rate.tolist()) == ([2], [50])
    assert not len(numbers.trained_per_second(lines[:1])[0])


def test_versions_table():
    told = [
        VersionPublished(0, "d0", 0),
        VersionApplied(0, 0.5),
        VersionPublished(1, "d1", 4),
        VersionApplied(1, 0.25),
        VersionApplied(1, 0.75),
        VersionPublished(2, "d2", 8),
    ]
    lines = [line(4, 20.0, version=1), line(5, 22.0, version=1), line(8, 30.0, version=2)]
    got = numbers.versions(told, lines, {0: 5.0, 1: 19.5}, {0: 5.5, 2: 31.0})
    assert got == [
        Version(0, 0, "d0", 5.0, 0.5, 0.5),
        Version(1, 4, "d1", 19.5, None, 0.75),
        Version(2, 8, "d2", 30.0, None, None),
    ]


def test_fates_that_only_the_journal_knows():
    old, done, cut, queued = (GroupId("lookup", prompt) for prompt in range(4))
    told = [
        BatchTaken(1, 0, (done,)),
        UpdateDone(1, 0.0, 1.0),
        GroupDropped(old, "3 pushes old"),
        BatchTaken(2, 0, (cut,)),
    ]
    fates = numbers.known_fates(told)
    assert fates == {done: TRAINED_1, old: Fate(Kind.DROPPED, reason="3 pushes old")}

    def fate_of(group: GroupId, logged: Fate) -> Fate:
        own = Recorded(trajectory(prompt=group.prompt), logged, "trainer")
        return numbers.settled(own, fates).fate

    open_ = Fate(Kind.OPEN)
    assert [fate_of(g, open_).kind for g in (old, done, cut, queued)] == [
        Kind.DROPPED, Kind.TRAINED, Kind.OPEN, Kind.OPEN,
    ]  # fmt: skip
    assert fate_of(done, Fate(Kind.FAILED)) == Fate(Kind.FAILED), "a fate that is told stands"
    ended = Fate(Kind.OPEN, reason="the run ended")
    assert fate_of(done, ended) == ended, "of an attempt before the one that was trained on"
