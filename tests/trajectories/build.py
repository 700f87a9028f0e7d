"""Small trajectories and groups for tests: by hand, and as hypothesis strategies."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from rl_jax.trajectories.types import (
    NOT_SAMPLED,
    Group,
    Origin,
    RolloutKey,
    Segment,
    Status,
    Trajectory,
    copy_of,
)

steady = settings(deadline=None, derandomize=True)
"""The same examples every time, however slow the machine is."""


def trajectory(
    sample: int = 0,
    reward: float | None = 1.0,
    versions: tuple[int, ...] = (0,),
    *,
    prompt: int = 0,
    attempt: int = 0,
    reason: str = "",
) -> Trajectory:
    """One prompt token, then one sampled token per version. No reward: it failed."""
    column = np.array([NOT_SAMPLED, *versions], np.int32)
    n = len(column)
    return Trajectory(
        key=RolloutKey("lookup", prompt, sample, attempt),
        tokens=np.arange(n, dtype=np.int32),
        loss_mask=column != NOT_SAMPLED,
        behavior_logprobs=np.where(column != NOT_SAMPLED, np.float32(-0.5), np.float32(0)),
        versions=column,
        segments=(Segment(0, n, max(versions, default=0), Origin.PREFILL),),
        temperature=1.0,
        reward=reward,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        reason=reason,
        turns=1,
    )


def group(prompt: int = 0, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """One trajectory per reward, its tokens sampled under `version` and the next."""
    members = (
        trajectory(i, r, (version, version + 1), prompt=prompt) for i, r in enumerate(rewards)
    )
    return Group("lookup", prompt, tuple(members))


def _bits(array: np.ndarray | None) -> tuple[object, ...] | None:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


def same_trajectory(a: Trajectory, b: Trajectory) -> bool:
    arrays = ("tokens", "loss_mask", "behavior_logprobs", "versions", "choices")
    rest = ("key", "segments", "temperature", "reward", "status", "reason", "turns", "copy_of")
    return all(_bits(getattr(a, n)) == _bits(getattr(b, n)) for n in arrays) and all(
        getattr(a, n) == getattr(b, n) for n in rest
    )


def same_group(a: Group, b: Group) -> bool:
    return (
        (a.task, a.prompt, a.failures) == (b.task, b.prompt, b.failures)
        and len(a.members) == len(b.members)
        and all(map(same_trajectory, a.members, b.members))
    )


INT32 = st.integers(0, 2**31 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def choices(draw: st.DrawFn, most: int) -> np.ndarray:
    """[n, M, k] of at most `most` tokens, in one byte or two."""
    shape = tuple(draw(st.integers(low, high)) for low, high in ((0, most), (1, 3), (1, 2)))
    dtype = draw(st.sampled_from((np.uint8, np.uint16)))
    draws = np.random.default_rng(draw(st.integers(0, 99)))
    return draws.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@st.composite
def trajectories(draw: st.DrawFn, task: str = "t", prompt: int = 0) -> Trajectory:
    n = draw(st.integers(0, 12))
    mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    sampled = np.array(draw(st.lists(INT32, min_size=n, max_size=n)), np.int32)
    logprobs = draw(st.lists(st.floats(-(2.0**60), 0, width=32), min_size=n, max_size=n))
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
    status = draw(st.sampled_from(Status))
    return Trajectory(
        key=RolloutKey(task, prompt, draw(st.integers(0, 99)), draw(st.integers(0, 3))),
        tokens=np.array(draw(st.lists(INT32, min_size=n, max_size=n)), np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.array(logprobs, np.float32), np.float32(0)),
        versions=np.where(mask, sampled, np.int32(NOT_SAMPLED)),
        segments=tuple(
            Segment(a, b, draw(INT32), draw(st.sampled_from(Origin)))
            for a, b in itertools.pairwise(cuts)
        ),
        temperature=draw(FINITE),
        reward=draw(FINITE | st.none()),
        status=status,
        reason=draw(st.text(max_size=20)),
        turns=draw(st.integers(0, 500)),
        choices=draw(st.none() | choices(n)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task, prompt = draw(st.text(max_size=8)), draw(st.integers(0, 2**40))
    member = trajectories(task=task, prompt=prompt)
    members = draw(st.lists(member, max_size=3, unique_by=lambda m: m.key.sample))
    copies = [copy_of(m) for m in members[: draw(st.integers(0, len(members)))]]
    failures = draw(st.lists(st.tuples(st.integers(0, 99), st.text(max_size=9)), max_size=2))
    return Group(task, prompt, (*members, *copies), tuple(failures))
