"""Batches for the conformance suite: a few trajectories, laid into rows in more ways than one.

Numbers are rounded to float32 once, so that the oracle in float64 and the library see the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from rl_jax.losses.evaluate import DTYPES
from rl_jax.losses.types import ENTROPY, PROXIMAL, REFERENCE, VALUE, Scores, ema, task_id, teacher
from rl_jax.masking import PADDING

ROWS, LENGTH = 8, 12
LENGTHS = (8, 5, 7, 6, 4, 7, 3, 2)
"""The last trajectory has no sampled token."""
TASKS = ("math", "code", "math", "code", "other", "code", "math", "math")
EMA, EXPERT, CODER = ema(0.8, 0.9), teacher("expert"), teacher("coder")
LOGPROBS = (PROXIMAL, REFERENCE, EMA, EXPERT, CODER)
"""Of other policies."""
OTHERS = (*LOGPROBS, ENTROPY, VALUE)
FIELDS = ("current", "behavior", "mask", "advantages", "lag", "tasks", "returns", *OTHERS)
REGIMES: Mapping[str, float] = {"near": 4e-4, "middle": 0.3, "far": 2.5}
"""Standard deviation of log-ratios: about the bands of sequences, of PPO, and beyond all."""

Tokens = dict[str, np.ndarray]
"""One trajectory's arrays [T] by field, and `weights`."""


class Place(NamedTuple):
    row: int
    start: int


Layout = dict[int, Place]
"""Where each trajectory lies; those that are not named are left out."""


@cache
def trajectories(regime: str, seed: int = 3) -> tuple[Tokens, ...]:
    """Eight trajectories of three tasks: advantages of both signs, one 0, one that changes sign."""
    return tuple(_one(i, n, REGIMES[regime], seed) for i, n in enumerate(LENGTHS))


def _one(number: int, length: int, spread: float, seed: int) -> Tokens:
    draws = np.random.default_rng([seed, number])

    def apart(other: np.ndarray) -> np.ndarray:
        """A policy that is `spread` apart, by a shift that is the trajectory's, and of noise."""
        noise = draws.normal(0.0, 0.5, length) + draws.choice([-0.8, -0.3, 0.3, 0.8])
        return np.minimum(other + spread * noise, -0.01)

    current = -draws.uniform(0.05, 3.0, length)
    mask = draws.random(length) < 0.75
    mask[1] = number != len(LENGTHS) - 1
    mask = mask & mask[1]
    advantages = np.full(length, (1.0, -1.5, 0.5, 0.0, -0.25, 2.0, -1.0, 1.0)[number])
    if number == 5:
        advantages = advantages * np.where(np.arange(length) % 2, -0.5, 1.0)
    made = {
        "current": current,
        "behavior": apart(current),
        "mask": mask,
        "advantages": advantages,
        "lag": draws.integers(0, 5, length),
        "tasks": np.full(length, task_id(TASKS[number])),
        "returns": draws.normal(size=length),
        **{name: apart(current) for name in LOGPROBS},
        ENTROPY: draws.uniform(0.1, 2.0, length),
        VALUE: draws.normal(size=length),
        "weights": np.where(mask, draws.uniform(0.2, 1.0, length), 0.0),
    }
    return {name: array.astype(_dtype(name)) for name, array in made.items()}


def _dtype(name: str) -> Any:
    return DTYPES.get(name, np.float32)


def changed(batch: Sequence[Tokens], **to: Any) -> tuple[Tokens, ...]:
    """Every sampled token's fields set to these values, or to what functions of the tokens say."""

    def one(own: Tokens) -> Tokens:
        new = {name: value(own) if callable(value) else value for name, value in to.items()}
        return own | {
            name: np.where(own["mask"], value, own[name]).astype(own[name].dtype)
            for name, value in new.items()
        }

    return tuple(map(one, batch))


# --- layouts -------------------------------------------------------------------------------------


def side_by_side(order: Iterable[int], gap: int, row: int = 0) -> Layout:
    """One after the other with `gap` tokens of padding before each, from `row` on."""
    layout, column = {}, 0
    for number in order:
        column += gap
        if column + LENGTHS[number] > LENGTH:
            row, column = row + 1, gap
        layout[number] = Place(row, column)
        column += LENGTHS[number]
    return layout


def alone(numbers: Iterable[int], start: int = 0) -> Layout:
    """Each in a row of its own."""
    return {number: Place(row, start) for row, number in enumerate(numbers)}


HOME = side_by_side(range(8), 0)
ELSEWHERE: Mapping[str, Layout] = {
    "tight, backwards": side_by_side(reversed(range(8)), 0),
    "with gaps, lower rows": side_by_side((3, 0, 6, 2, 7, 5, 1, 4), 1, row=2),
    "each in its row": alone(range(8), 4),
}
SPLITS: Mapping[int, Sequence[Layout]] = {
    1: (HOME,),
    2: (side_by_side(range(4), 1), side_by_side(range(4, 8), 0)),
    7: (*({i: Place(i % ROWS, i)} for i in range(6)), side_by_side((6, 7), 2)),
}
"""Microbatches: all rows are there in each, most of them padding."""


def laid(
    batch: Sequence[Tokens],
    layout: Layout,
    needs: Iterable[str],
    fill: Mapping[str, Any] | None = None,
) -> tuple[Scores, np.ndarray]:
    """The scores [ROWS, LENGTH] with the others that `needs` names, and the weights.

    `fill`: what stands where nothing was sampled; 0 otherwise.
    """
    segments = np.full((ROWS, LENGTH), PADDING, np.int32)
    arrays = {name: np.zeros((ROWS, LENGTH), _dtype(name)) for name in (*FIELDS, "weights")}
    for name, value in (fill or {}).items():
        arrays[name][:] = value
    for number, (row, start) in layout.items():
        own = batch[number]
        cut = row, slice(start, start + LENGTHS[number])
        assert (segments[cut] == PADDING).all()
        segments[cut] = number
        arrays["mask"][cut] = own["mask"]
        for name in arrays:
            there = own["mask"] if name in (fill or ()) else True
            arrays[name][cut] = np.where(there, own[name], arrays[name][cut])
    weights = arrays.pop("weights")
    others = {name: arrays.pop(name) for name in OTHERS}
    chosen = {name: others[name] for name in needs}
    return Scores(**arrays, segments=segments, others=chosen), weights


def cut(array: Any, layout: Layout) -> dict[int, np.ndarray]:
    """[ROWS, LENGTH] back into the trajectories' arrays."""
    host = np.asarray(array)
    return {
        number: host[row, start : start + LENGTHS[number]]
        for number, (row, start) in layout.items()
    }
