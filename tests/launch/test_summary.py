"""[N] Busy time by hand and against a brute count; the summary's keys."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.summary import Summary, busy, busy_seconds, overlap_seconds, report

SUMMARY = Summary(
    seed=1,
    solve_rate_before=0.5,
    solve_rate_after=0.875,
    solve_rate_by_hops_before={"1": 1.0, "4": 0.25},
    solve_rate_by_hops_after={"1": 1.0, "4": 0.75},
    steps=60,
    versions_published=15,
    max_lag=2,
    trained_tokens=412345,
    dropped=37,
    trainer_busy_seconds=150.0,
    sampler_busy_seconds=200.0,
    overlap_seconds=60.0,
    max_dlogp_fresh=3e-6,
    wall_seconds=360.4,
)


def in_floats(spans):
    return [(float(start), float(end)) for start, end in spans]


@pytest.mark.parametrize(
    ("a", "b", "seconds"),
    [
        ([], [(0, 5)], 0),
        ([(0, 1)], [(1, 2)], 0),  # touching is not overlapping
        ([(0, 10)], [(2, 3), (5, 7)], 3),
        ([(0, 4), (6, 9)], [(3, 7)], 2),
        ([(0, 4), (2, 5)], [(1, 3)], 2),  # a's own overlap counts once
        ([(0, 2), (0, 2)], [(0, 2), (1, 3)], 2),
        ([(3, 3)], [(0, 9)], 0),
        ([(6, 9), (0, 4)], [(8, 20), (3, 7)], 3),  # in any order
    ],
)
def test_overlap_by_hand(a, b, seconds):
    a, b = in_floats(a), in_floats(b)
    assert overlap_seconds(a, b) == overlap_seconds(b, a) == seconds


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


def seconds_in(intervals):
    return {t for start, end in intervals for t in range(start, end)}


@settings(deadline=None)
@given(spans, spans)
def test_against_counting_seconds(a, b):
    assert busy_seconds(in_floats(a)) == len(seconds_in(a))
    assert overlap_seconds(in_floats(a), in_floats(b)) == len(seconds_in(a) & seconds_in(b))
    ends = [t for span in busy(in_floats(a)) for t in span]
    assert ends == sorted(set(ends))


def test_json_has_exactly_the_fields():
    told = json.loads(SUMMARY.to_json())
    assert list(told) == [f.name for f in fields(Summary)]
    assert told["solve_rate_by_hops_after"] == {"1": 1.0, "4": 0.75}
    assert told["max_dlogp_fresh"] == 3e-6


def test_report():
    assert list(report(SUMMARY)) == [
        "held-out solve rate 0.50 -> 0.88",
        "  by hops  1: 1.00 -> 1.00  4: 0.25 -> 0.75",
        "60 updates, 15 versions, lag at most 2, 412,345 tokens trained, 37 trajectories dropped",
        "trainer busy 150 s, 40% of it while the sampler worked too; sampler busy 200 s of 360 s",
        "fresh tokens: trainer and sampler log-probabilities differ by at most 3.0e-06",
    ]
