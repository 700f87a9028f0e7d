"""[N] From groups to the arrays of an optimizer step: packed rows, microbatches of fixed shape."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from rl_jax.advantages import Advantage, Estimates, estimate
from rl_jax.arrays import CHUNK, AnyArray, round_up
from rl_jax.losses.types import Reduction, task_id
from rl_jax.masking import PADDING
from rl_jax.trajectories.packing import Place, pack
from rl_jax.trajectories.types import NOT_SAMPLED, Group, Trajectory


class Batch(NamedTuple):
    """Arrays [M, R, L]: M microbatches of R rows of L tokens, of which the first `count` are used.

    The shapes do not depend on the data, so the step never retraces; unused microbatches are not
    computed. Padding has segment -1, token 0, weight 0.
    """

    tokens: AnyArray
    """int32."""
    positions: AnyArray
    """int32, absolute in the trajectory."""
    segment_ids: AnyArray
    """int32, the trajectory's number in the batch."""
    mask: AnyArray
    """bool, sampled tokens."""
    behavior: AnyArray
    """float32 recorded log-probabilities."""
    advantages: AnyArray
    """float32."""
    returns: AnyArray
    """float32, what a critic shall predict before each token."""
    weights: AnyArray
    """float32 from the reduction."""
    temperature: AnyArray
    """float32."""
    lag: AnyArray
    """int32."""
    tasks: AnyArray
    """int32, `task_id` of the trajectory's task."""
    count: AnyArray
    """int32 scalar, used microbatches."""
    choices: AnyArray | None = None
    """int16[M, R, L, layers, k], the experts that the sampler chose, -1 where it did not record
    them; None for a run that records none."""


class Shape(NamedTuple):
    """The fixed shape of a batch."""

    microbatches: int
    rows: int
    row_length: int


def batch_shape(trajectories: int, max_tokens: int, rows: int, row_length: int) -> Shape:
    """Enough microbatches for `trajectories` of up to `max_tokens` tokens, however they pack."""
    per_row = row_length // round_up(max_tokens, CHUNK)
    if not per_row:
        raise ValueError(f"rows of {row_length} tokens cannot hold trajectories of {max_tokens}")
    return Shape(round_up(-(-trajectories // per_row), rows) // rows, rows, row_length)


class Built(NamedTuple):
    """A batch without advantages yet, and where its trajectories lie."""

    batch: Batch
    places: list[Place]
    """Of each trajectory, in order."""
    padding: float
    """Share of padding in the used microbatches."""


def build_batch(
    trajectories: Sequence[Trajectory],
    reduction: Reduction,
    published_version: int,
    shape: Shape,
    choices: tuple[int, int] | None = None,
) -> Built:
    """Packs `trajectories` into `shape`; advantages and returns are zero.

    `choices` (layers, of a token) is what there is room for of the experts that were recorded, as
    in `empty_batch`. Raises ValueError where they do not fit, or a recorded log-probability is not
    finite, or as `reduce`.
    """
    places = pack([len(t.tokens) for t in trajectories], shape.row_length)
    rows_used = 1 + max((p.row for p in places), default=-1)
    count = round_up(rows_used, shape.rows) // shape.rows
    if count > shape.microbatches:
        raise ValueError(
            f"{rows_used} rows exceed {shape.microbatches} microbatches of {shape.rows}"
        )
    batch = empty_batch(shape, choices)
    rows = zip(trajectories, places, reduce(reduction, trajectories), strict=True)
    for number, (trajectory, place, weight) in enumerate(rows):
        cut = _where(place, len(trajectory.tokens), shape)
        _fill(batch, cut, number, trajectory, published_version)
        batch.weights[cut] = weight
    filled = sum(len(t.tokens) for t in trajectories)
    padding = 1.0 - filled / max(1, count * shape.rows * shape.row_length)
    return Built(batch._replace(count=np.array(count, np.int32)), places, padding)


def reduce(reduction: Reduction, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The reduction's weights; a ValueError names it and the trajectory that it fails."""
    name = getattr(reduction, "__qualname__", repr(reduction)).split(".<locals>")[0]
    weights = list(reduction(trajectories))
    if len(weights) != len(trajectories):
        raise ValueError(f"{name}: {len(weights)} arrays for {len(trajectories)} trajectories")
    for trajectory, own in zip(trajectories, weights, strict=True):
        found, wanted = (np.asarray(own).dtype, np.shape(own)), trajectory.tokens.shape
        if found != (np.float32, wanted):
            raise ValueError(
                f"{name}: {found[0]}{list(found[1])} for {trajectory.key}, needs "
                f"float32{list(wanted)}"
            )
    return weights


def per_group(
    groups: Sequence[Group], found: Mapping[str, Sequence[np.ndarray]]
) -> list[Estimates]:
    """What was `found` for all members in order, by the estimate's name, group by group."""
    own = {name: iter(arrays) for name, arrays in found.items()}
    return [
        Estimates(**{name: tuple(islice(left, len(group.members))) for name, left in own.items()})
        for group in groups
    ]


def advantaged(
    built: Built, advantage: Advantage, groups: Sequence[Group], estimates: Sequence[Estimates]
) -> Batch:
    """The batch of all members of `groups`, in order, with their advantages and returns."""
    told = estimate(advantage, groups, estimates)
    advantages, returns = (list(chain.from_iterable(arrays)) for arrays in told)
    return with_advantages(built.batch, built.places, advantages, returns)


def with_advantages(
    batch: Batch,
    places: Sequence[Place],
    advantages: Sequence[np.ndarray],
    returns: Sequence[np.ndarray],
) -> Batch:
    """`batch` with one float32[T] of advantages and one of returns for each trajectory."""
    return batch._replace(
        advantages=spread(batch, places, advantages), returns=spread(batch, places, returns)
    )


def spread(batch: Batch, places: Sequence[Place], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """float32[M, R, L]: each trajectory's array at its place, 0 elsewhere."""
    shape = Shape(*batch.tokens.shape)
    whole = np.zeros(shape, np.float32)
    for place, array in zip(places, arrays, strict=True):
        whole[_where(place, len(array), shape)] = array
    return whole


def cut(
    array: np.ndarray, places: Sequence[Place], trajectories: Sequence[Trajectory]
) -> list[np.ndarray]:
    """What `array` [M, R, L] holds at each trajectory's place: one [T] each, views of it."""
    shape = Shape(*array.shape)
    return [
        array[_where(place, len(trajectory.tokens), shape)]
        for place, trajectory in zip(places, trajectories, strict=True)
    ]


def host_microbatch(batch: Batch, index: int) -> Batch:
    """One microbatch [R, L] of a batch, as views of it."""
    return map_arrays(lambda leaf: leaf[index], batch)


def map_arrays(change: Callable[[AnyArray], AnyArray], batch: Batch) -> Batch:
    """The batch with `change` made to every array in it but the count."""
    changed = {
        name: change(leaf)
        for name, leaf in batch._asdict().items()
        if name != "count" and leaf is not None
    }
    return batch._replace(**changed)


def locate(batch: Batch, microbatch: int, row: int, column: int) -> int:
    """The number of the trajectory at this place of the batch; -1 on padding."""
    return int(batch.segment_ids[microbatch, row, column])


Cut = tuple[int, int, slice]


def _where(place: Place, length: int, shape: Shape) -> Cut:
    microbatch, row = divmod(place.row, shape.rows)
    return microbatch, row, slice(place.start, place.start + length)


def empty_batch(shape: Shape, choices: tuple[int, int] | None = None) -> Batch:
    """Padding only, no microbatch used; with room for `choices`: (layers, of a token)."""

    def full(value: float, dtype: type) -> np.ndarray:
        return np.full(shape, value, dtype)

    return Batch(
        tokens=full(0, np.int32),
        positions=full(0, np.int32),
        segment_ids=full(PADDING, np.int32),
        mask=full(0, np.bool_),
        behavior=full(0, np.float32),
        advantages=full(0, np.float32),
        returns=full(0, np.float32),
        weights=full(0, np.float32),
        temperature=full(1, np.float32),
        lag=full(0, np.int32),
        tasks=full(0, np.int32),
        count=np.zeros((), np.int32),
        choices=np.full((*shape, *choices), -1, np.int16) if choices else None,
    )


def _fill(batch: Batch, cut: Cut, number: int, trajectory: Trajectory, published: int) -> None:
    _check_behavior(trajectory)
    batch.tokens[cut] = trajectory.tokens
    batch.positions[cut] = np.arange(len(trajectory.tokens))
    batch.segment_ids[cut] = number
    batch.mask[cut] = trajectory.loss_mask
    batch.behavior[cut] = trajectory.behavior_logprobs
    batch.temperature[cut] = trajectory.temperature
    sampled = trajectory.versions != NOT_SAMPLED
    batch.lag[cut] = np.where(sampled, published - trajectory.versions, 0)
    batch.tasks[cut] = task_id(trajectory.key.task)
    if batch.choices is not None and trajectory.choices is not None:
        _fill_choices(batch.choices, cut, trajectory, trajectory.choices)


def _fill_choices(room: AnyArray, cut: Cut, trajectory: Trajectory, choices: np.ndarray) -> None:
    if choices.shape[1:] != room.shape[3:]:
        raise ValueError(
            f"choices of {trajectory.key}: {list(choices.shape[1:])} experts of a token, the model "
            f"takes {list(room.shape[3:])}"
        )
    microbatch, row, where = cut
    room[microbatch, row, where.start : where.start + len(choices)] = choices


def _check_behavior(trajectory: Trajectory) -> None:
    bad = np.flatnonzero(trajectory.loss_mask & ~np.isfinite(trajectory.behavior_logprobs))
    if len(bad):
        value = float(trajectory.behavior_logprobs[bad[0]])
        raise ValueError(f"behavior_logprobs of {trajectory.key} is {value} at token {bad[0]}")
