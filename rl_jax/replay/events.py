"""[N] What a run's journal can say: one frozen record per kind of event, and its plain form.

The plain form is a msgpack map that begins with "kind". Decoding takes exactly what encoding makes.
"""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from rl_jax.trajectories.codec import Plain, decode_group, decode_key, encode_group
from rl_jax.trajectories.types import Group, RolloutKey


class GroupId(NamedTuple):
    """Which group: the rollouts that it was assembled from tell it from every other."""

    task: str
    prompt: int
    rollouts: tuple[tuple[int, int], ...]
    """(sample, attempt) of its members, padding copies left out."""


def group_id(group: Group) -> GroupId:
    """The identity of a group."""
    keys = [m.key for m in group.members if m.copy_of is None]
    return GroupId(group.task, group.prompt, tuple((k.sample, k.attempt) for k in keys))


@dataclass(frozen=True)
class RunStarted:
    kind: ClassVar[str] = "run_started"
    seed: int
    config: str
    """The whole configuration as text."""
    fingerprint: str
    """What the run's numerics depend on, as text."""


@dataclass(frozen=True)
class RolloutStarted:
    kind: ClassVar[str] = "rollout_started"
    key: RolloutKey


@dataclass(frozen=True)
class RolloutFailed:
    kind: ClassVar[str] = "rollout_failed"
    key: RolloutKey
    reason: str


@dataclass(frozen=True)
class GroupPut:
    """Written before the queue's `put` returns, with every token."""

    kind: ClassVar[str] = "group_put"
    group: Group


@dataclass(frozen=True)
class GroupDropped:
    kind: ClassVar[str] = "group_dropped"
    group: GroupId
    reason: str


@dataclass(frozen=True)
class BatchTaken:
    """Written before update `step` runs."""

    kind: ClassVar[str] = "batch_taken"
    step: int
    published_version: int
    groups: tuple[GroupId, ...]
    """In the order of the batch."""


@dataclass(frozen=True)
class UpdateDone:
    kind: ClassVar[str] = "update_done"
    step: int
    metrics: Mapping[str, float]
    digest: str = ""
    """Of the parameters after it; empty where it was not computed."""


@dataclass(frozen=True)
class VersionPublished:
    """Written before the snapshot pointer moves."""

    kind: ClassVar[str] = "version_published"
    version: int
    digest: str
    step: int


Event = (
    RunStarted
    | RolloutStarted
    | RolloutFailed
    | GroupPut
    | GroupDropped
    | BatchTaken
    | UpdateDone
    | VersionPublished
)

_KINDS: Mapping[str, type[Event]] = {kind.kind: kind for kind in typing.get_args(Event)}


def encode(event: Event) -> Plain:
    """The plain form."""
    values = {f.name: _plain(getattr(event, f.name)) for f in fields(event)}
    return {"kind": event.kind} | values


def decode(value: object) -> Event:
    """The event of a plain form; a ValueError names the kind and field that are wrong."""
    if not isinstance(value, Mapping) or value.get("kind") not in _KINDS:
        raise ValueError(f"no event: kind is none of {sorted(_KINDS)}")
    kind = _KINDS[value["kind"]]
    names = {f.name for f in fields(kind)}
    if set(value) - {"kind"} != names:
        raise ValueError(f"{kind.kind}: {sorted(map(str, value))}; {sorted(names)} expected")
    hints = typing.get_type_hints(kind)
    try:
        return kind(**{name: _parse(hints[name], value[name]) for name in names})
    except ValueError as error:
        raise ValueError(f"{kind.kind}: {error}") from error


def _plain(value: Any) -> Any:
    match value:
        case Group():
            return encode_group(value)
        case tuple():
            return [_plain(v) for v in value]
        case Mapping():
            return {key: float(number) for key, number in value.items()}
        case _:
            return value


def _parse(hint: Any, value: Any) -> Any:
    if hint in _PARSERS:
        return _PARSERS[hint](value)
    if type(value) is not hint:
        raise ValueError(f"{value!r:.80} is not {hint.__name__}")
    return value


def _parse_list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r:.80} is not a list")
    return list(value)


def _parse_group_id(value: Any) -> GroupId:
    if len(_parse_list(value)) != 3:
        raise ValueError(f"{value!r:.80} is not [task, prompt, rollouts]")
    task, prompt, rollouts = value
    keys = [decode_key([task, prompt, *_parse_list(r)]) for r in _parse_list(rollouts)]
    decode_key([task, prompt, 0, 0])
    return GroupId(task, prompt, tuple((k.sample, k.attempt) for k in keys))


def _parse_metrics(value: Any) -> Mapping[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r:.80} is not a map")
    return types.MappingProxyType({_parse(str, k): _parse(float, v) for k, v in value.items()})


_PARSERS: Mapping[Any, Callable[[Any], Any]] = {
    Group: decode_group,
    RolloutKey: decode_key,
    GroupId: _parse_group_id,
    tuple[GroupId, ...]: lambda value: tuple(map(_parse_group_id, _parse_list(value))),
    Mapping[str, float]: _parse_metrics,
}
