"""[N] What became of a trajectory, and the units of a trajectory log as plain values.

A unit is a group or a trajectory of its own, with its fate: {"kind": "group" or "trajectory",
"v": [fate, body]}, a fate [kind, step, reason].
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from rl_jax.trajectories.codec import (
    MAX_TEXT,
    Plain,
    decode_group,
    decode_trajectory,
    encode_group,
    encode_trajectory,
)
from rl_jax.trajectories.types import Group, Trajectory


class Kind(StrEnum):
    TRAINED = "trained"
    DROPPED = "dropped"
    """At the queue."""
    DISCARDED = "discarded"
    """Its group never came to be."""
    FAILED = "failed"
    """The environment broke."""
    EVALUATED = "evaluated"
    OPEN = "open"
    """None yet: in the queue, or its group under way, also when the run ended."""


class Fate(NamedTuple):
    kind: Kind
    step: int = -1
    """The update that trained it; of an evaluation, the version."""
    reason: str = ""


OPEN = Fate(Kind.OPEN)


class Recorded(NamedTuple):
    """A trajectory as a run's record tells it."""

    trajectory: Trajectory
    fate: Fate
    program: str
    """Whose log it is in."""


class Unit(NamedTuple):
    """What is written as one, and has one fate."""

    body: Group | Trajectory
    fate: Fate


def encode_unit(unit: Unit) -> Plain:
    """The plain form; errors as `encode_group`."""
    if isinstance(unit.body, Group):
        return {"kind": "group", "v": [_encode_fate(unit.fate), encode_group(unit.body)]}
    return {"kind": "trajectory", "v": [_encode_fate(unit.fate), encode_trajectory(unit.body)]}


def decode_unit(value: object) -> Unit:
    """The unit of a plain form; a ValueError names what is wrong."""
    if not isinstance(value, Mapping) or set(value) != {"kind", "v"}:
        raise ValueError("unit: a map of kind and v expected")
    if not isinstance(value["v"], list) or len(value["v"]) != 2:
        raise ValueError("unit: v is no list of fate and body")
    fate, body = value["v"]
    match value["kind"]:
        case "group":
            return Unit(decode_group(body), _decode_fate(fate))
        case "trajectory":
            return Unit(decode_trajectory(body), _decode_fate(fate))
    raise ValueError(f"unit: kind {value['kind']!r:.80} is neither group nor trajectory")


def with_fate(plain: Mapping[str, Any], fate: Fate) -> Plain:
    """The plain form of a unit under another fate."""
    return {"kind": plain["kind"], "v": [_encode_fate(fate), plain["v"][1]]}


def _encode_fate(fate: Fate) -> list[Any]:
    return [fate.kind.value, fate.step, fate.reason]


def _decode_fate(value: object) -> Fate:
    match value:
        case [str(kind), int(step), str(reason)] if (
            kind in list(Kind) and type(step) is int and step >= -1 and len(reason) <= MAX_TEXT
        ):
            return Fate(Kind(kind), step, reason)
    raise ValueError(f"fate: {value!r:.80} is not [kind, step, reason]")
