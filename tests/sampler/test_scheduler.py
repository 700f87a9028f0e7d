"""What the next step is, by hand; segments as tokens enter the cache."""

import numpy as np
import pytest

from rl_jax.gateway.protocol import Request
from rl_jax.sampler.page_table import PageRow
from rl_jax.sampler.scheduler import Plan, Running, Sequence, Shapes, plan, step_size
from rl_jax.trajectories.types import Origin, RolloutKey, Segment

SHAPES = Shapes(slots=4, prefill_rows=2, prefill_tokens=(16, 64))
REQUEST = Request((), 8, frozenset(), 1.0)


def sequence(
    number: int,
    length: int,
    cached: int,
    *,
    shard: int = 0,
    started: bool = True,
    idle: bool = False,
) -> Sequence:
    row = PageRow(shard, np.zeros((1, 4), np.int32), np.zeros(1, np.int32))
    running = None if idle else Running(REQUEST, (0, 0), started)
    key = RolloutKey("t", number, 0)
    return Sequence(number, key, row, [0] * length, cached, running=running)


def decoding(number: int, **rest: bool | int) -> Sequence:
    return sequence(number, 10, 9, **rest)


def shown(step: Plan | None) -> tuple[int, list[int | None], list[int]] | None:
    """(width, numbers, counts)."""
    if step is None:
        return None
    return step.width, [s.number if s else None for s in step.rows], step.counts


def test_nothing_to_do() -> None:
    assert plan([], SHAPES) is None
    assert plan([sequence(0, 10, 0, idle=True), decoding(1, idle=True)], SHAPES) is None


def test_decode_takes_the_oldest_and_leaves_rows_idle() -> None:
    assert shown(plan([decoding(i) for i in range(3)], SHAPES)) == (
        1, [0, 1, 2, None], [1, 1, 1, 0],
    )  # fmt: skip
    assert shown(plan([decoding(i) for i in range(6)], SHAPES)) == (1, [0, 1, 2, 3], [1] * 4)


@pytest.mark.parametrize(
    ("decodes", "prefills", "width"),
    [
        (0, 1, 16),  # nothing decodes
        (1, 1, 16),  # the decode batch has room
        (2, 0, 1),
        (4, 1, 16),  # one of two prefill rows is half of them
    ],
)
def test_prefill_or_decode(decodes: int, prefills: int, width: int) -> None:
    ready = [decoding(i) for i in range(decodes)]
    ready += [sequence(10 + i, 12, 0) for i in range(prefills)]
    step = plan(ready, SHAPES)
    assert step is not None and step.width == width


def test_a_full_decode_batch_goes_before_a_few_prefills() -> None:
    shapes = SHAPES._replace(prefill_rows=4)
    ready = [decoding(0), decoding(1), sequence(2, 12, 0)]
    assert shown(plan(ready, shapes)) == (1, [0, 1, None, None], [1, 1, 0, 0])
    ready.append(sequence(3, 12, 0))
    assert shown(plan(ready, shapes)) == (16, [2, 3, None, None], [12, 12, 0, 0])


@pytest.mark.parametrize(
    ("length", "cached", "expected"),
    [
        (10, 0, 10),
        (64, 0, 64),
        (65, 0, 64),
        (200, 0, 64),
        (100, 50, 14),  # up to 64, where training cuts
        (100, 64, 36),
        (130, 127, 1),
        (129, 128, 1),
    ],
)
def test_a_step_never_crosses_a_multiple_of_64(length: int, cached: int, expected: int) -> None:
    assert step_size(sequence(0, length, cached), 64) == expected


def test_a_step_is_at_most_as_wide_as_the_program() -> None:
    assert step_size(sequence(0, 60, 0), 16) == 16
    assert step_size(sequence(0, 60, 56), 16) == 4


def test_prefill_takes_those_that_need_the_same_compiled_length_as_the_oldest() -> None:
    """So what a sequence is computed by depends on itself, not on who runs beside it."""
    short, long, other = sequence(0, 12, 0), sequence(1, 40, 0), sequence(2, 16, 0)
    assert shown(plan([short, long, other], SHAPES)) == (16, [0, 2], [12, 16])
    assert shown(plan([long, short, other], SHAPES)) == (64, [1, None], [40, 0])
    chunks = [sequence(3, 90, 64), sequence(4, 81, 64), sequence(5, 78, 64)]
    assert shown(plan(chunks, SHAPES)) == (64, [3, 4], [26, 17])


def test_rows_of_a_shard_are_those_of_its_sequences() -> None:
    shapes = SHAPES._replace(shards=2)
    ready = [decoding(0, shard=1), decoding(1, shard=1), decoding(2, shard=1), decoding(3)]
    assert shown(plan(ready, shapes)) == (1, [3, None, 0, 1], [1, 0, 1, 1])
    waiting = [sequence(4, 9, 0, shard=1), sequence(5, 9, 0, shard=1), sequence(6, 9, 0)]
    assert shown(plan(waiting, shapes)) == (16, [6, 4], [9, 9])


def test_draining_advances_started_requests_only() -> None:
    started, fresh = decoding(0), sequence(1, 12, 0, started=False)
    assert shown(plan([started, fresh], SHAPES, draining=True)) == (
        1, [0, None, None, None], [1, 0, 0, 0],
    )  # fmt: skip
    assert plan([fresh], SHAPES, draining=True) is None
    assert shown(plan([fresh], SHAPES)) == (16, [1, None], [12, 0])


# --- segments ------------------------------------------------------------------------------------


def test_segments_tell_how_each_token_entered_the_cache() -> None:
    own = sequence(0, 12, 0)
    own.enter_cache(8, 0, Origin.PREFILL)
    own.enter_cache(2, 0, Origin.PREFILL)
    own.enter_cache(1, 0, Origin.DECODE)
    own.enter_cache(1, 0, Origin.DECODE)
    assert own.segments == [
        Segment(0, 10, 0, Origin.PREFILL),
        Segment(10, 12, 0, Origin.DECODE),
    ]
    assert own.uncached == 0


def test_what_was_cached_before_a_swap_is_recomputed_after_it() -> None:
    own = sequence(0, 12, 0)
    own.enter_cache(10, 0, Origin.PREFILL)
    own.invalidate()
    assert own.uncached == 12
    own.enter_cache(8, 1, Origin.PREFILL)
    own.enter_cache(4, 1, Origin.PREFILL)
    assert own.segments[1:] == [
        Segment(0, 10, 1, Origin.RECOMPUTE),
        Segment(10, 12, 1, Origin.PREFILL),
    ]


def test_a_swap_in_the_middle_of_a_recomputation_starts_it_again() -> None:
    own = sequence(0, 12, 0)
    own.enter_cache(10, 0, Origin.PREFILL)
    own.invalidate()
    own.enter_cache(4, 1, Origin.PREFILL)
    own.invalidate()
    own.enter_cache(12, 2, Origin.PREFILL)
    assert own.segments[1:] == [
        Segment(0, 4, 1, Origin.RECOMPUTE),
        Segment(0, 10, 2, Origin.RECOMPUTE),
        Segment(10, 12, 2, Origin.PREFILL),
    ]
