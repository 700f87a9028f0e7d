"""The versions in a token's cache, against a cache that is kept token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.sampler.page_table import PageRow
from rl_jax.sampler.scheduler import Sequence
from rl_jax.trajectories.lineage import cache_versions, pure
from rl_jax.trajectories.types import (
    NOT_SAMPLED,
    Origin,
    RolloutKey,
    Segment,
    Status,
    Trajectory,
)
from tests.trajectories.build import steady

KEY = RolloutKey("t", 0, 0)


def trajectory(versions: list[int], segments: list[Segment]) -> Trajectory:
    column = np.array(versions, np.int32)
    return Trajectory(
        key=KEY,
        tokens=np.zeros(len(column), np.int32),
        loss_mask=column != NOT_SAMPLED,
        behavior_logprobs=np.zeros(len(column), np.float32),
        versions=column,
        segments=tuple(segments),
        temperature=1.0,
        reward=1.0,
        status=Status.COMPLETED,
    )


def segment(start: int, end: int, version: int) -> Segment:
    return Segment(start, end, version, Origin.DECODE)


@pytest.mark.parametrize(
    ("segments", "caches"),
    [
        ([(0, 5, 0)], [0, 0, 0, 0]),
        ([(0, 3, 0), (3, 5, 1)], [0, 0, 0, 0]),
        ([(0, 2, 0), (2, 3, 1), (0, 3, 1), (3, 5, 1)], [0, 0, 1, 1]),
        ([(0, 3, 0), (0, 3, 1), (3, 4, 1), (4, 5, 2)], [0, 0, 1, 1]),
        ([(0, 3, 0), (0, 2, 1), (0, 5, 2)], [0, 0, 2, 2]),
        ([(0, 3, 0)], [0, 0, -1, -1]),
        ([(0, 99, 4)], [4, 4, 4, 4]),
        ([], [-1, -1, -1, -1]),
    ],
    ids=["one", "kept", "recomputed", "and kept", "twice", "cut", "beyond", "none"],
)
def test_by_hand(segments: list[tuple[int, int, int]], caches: list[int]) -> None:
    """Two tokens given, four sampled under 9."""
    own = trajectory([-1, -1, 9, 9, 9, 9], [segment(*s) for s in segments])
    assert cache_versions(own).tolist() == [-1, -1, *caches]
    assert cache_versions(own).dtype == np.int32
    assert not pure(own).any()


def test_pure_asks_for_the_tokens_own_version_in_the_whole_cache() -> None:
    own = trajectory(
        [-1, 0, 0, 1, 1, -1, 1], [segment(0, 2, 0), segment(2, 3, 1), segment(0, 6, 1)]
    )
    assert cache_versions(own).tolist() == [-1, 0, 0, 0, 1, -1, 1]
    assert pure(own).tolist() == [False, True, True, False, True, False, True]


KINDS = st.sampled_from(["step", "step", "step", "append", "keep", "recompute"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(1, 5)), max_size=40)


@steady
@given(EVENTS)
def test_against_a_cache_kept_token_by_token(events: list[tuple[str, int]]) -> None:
    """Steps of up to n tokens, a token sampled whenever the log is cached; swaps in between."""
    row = PageRow(0, np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    own = Sequence(0, KEY, row, [0, 0])
    versions, caches, cache, version = [-1, -1], [-1, -1], [], 0
    for event, count in events:
        match event:
            case "append":
                own.tokens += [0] * count
                versions += [-1] * count
                caches += [-1] * count
            case "keep":
                version += 1
            case "recompute":
                version += 1
                own.invalidate()
                cache = []
            case "step":
                taken = min(count, own.uncached)
                own.enter_cache(taken, version, Origin.DECODE)
                cache += [version] * taken
                if not own.uncached:
                    own.tokens.append(0)
                    versions.append(version)
                    caches.append(min(cache))
        assert own.oldest_cached == min(cache, default=np.inf)
    got = trajectory(versions, own.segments)
    assert cache_versions(got).tolist() == caches
    assert pure(got).tolist() == [v != -1 and v == c for v, c in zip(versions, caches, strict=True)]
