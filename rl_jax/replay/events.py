"""[N] What a run's journals can say: one frozen record per kind of event, and its plain form.

Events are small, 150 bytes on disk or less: what trajectories hold is in the trajectory log. The
plain form is {"kind": name, "v": [field, ...]}, fields in the order of the class. Decoding takes
exactly what encoding makes.
"""

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import groupby
from typing import Annotated, Any, ClassVar, NamedTuple

from rl_jax.trajectories.codec import Plain, decode_key
from rl_jax.trajectories.types import Group, RolloutKey


class GroupId(NamedTuple):
    """Which group: a prompt makes one group in a run."""

    task: str
    prompt: int


Digest = Annotated[str, "a sha256 in hex is 32 bytes on disk"]


def group_id(group: Group) -> GroupId:
    """The identity of a group."""
    return GroupId(group.task, group.prompt)


@dataclass(frozen=True)
class RunStarted:
    """Of the trainer: a process begins, anew or at a resume."""

    kind: ClassVar[str] = "run_started"
    seed: int
    fingerprint: Digest
    """What the run's numerics depend on."""
    update: int
    """The last one applied: 0 anew, more after a resume."""


@dataclass(frozen=True)
class RunEnded:
    """Of the trainer."""

    kind: ClassVar[str] = "run_ended"
    reason: str
    """finished or stopped."""


@dataclass(frozen=True)
class RolloutStarted:
    """Of the orchestrator."""

    kind: ClassVar[str] = "rollout_started"
    key: RolloutKey


@dataclass(frozen=True)
class RolloutDone:
    """Of the orchestrator, for every way of ending but `RolloutLost`."""

    kind: ClassVar[str] = "rollout_done"
    key: RolloutKey
    status: str
    tokens: int


@dataclass(frozen=True)
class RolloutLost:
    """Of the orchestrator: ended by no fault of its own, issued again as the next attempt."""

    kind: ClassVar[str] = "rollout_lost"
    key: RolloutKey
    reason: str


@dataclass(frozen=True)
class GroupPut:
    """Of the trainer, before the queue's `put` returns; every token is in its trajectory log."""

    kind: ClassVar[str] = "group_put"
    group: GroupId
    oldest_version: int
    tokens: int


@dataclass(frozen=True)
class GroupDropped:
    """Of the trainer, at consumption."""

    kind: ClassVar[str] = "group_dropped"
    group: GroupId
    reason: str


@dataclass(frozen=True)
class GroupDiscarded:
    """Of the orchestrator: never put, for too few valid members or too many groups."""

    kind: ClassVar[str] = "group_discarded"
    group: GroupId
    reason: str


@dataclass(frozen=True)
class BatchTaken:
    """Of the trainer, before update `step` runs."""

    kind: ClassVar[str] = "batch_taken"
    step: int
    published_version: int
    groups: tuple[GroupId, ...]
    """In the order of the batch."""


@dataclass(frozen=True)
class UpdateDone:
    """Of the trainer."""

    kind: ClassVar[str] = "update_done"
    step: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class VersionPublished:
    """Of the trainer, before the snapshot pointer moves."""

    kind: ClassVar[str] = "version_published"
    version: int
    digest: Digest
    step: int


@dataclass(frozen=True)
class VersionApplied:
    """Of a sampler: it samples under `version` from here on."""

    kind: ClassVar[str] = "version_applied"
    version: int
    pause_s: float
    """For how long the swap kept it from sampling."""


@dataclass(frozen=True)
class CheckpointSaved:
    """Of the trainer: a resume may start from it."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int
    version: int


@dataclass(frozen=True)
class Evaluated:
    """Of the orchestrator."""

    kind: ClassVar[str] = "evaluated"
    when: str
    """before or after."""
    version: int
    rates: Mapping[str, float]
    """Solve rates by label, "all" for all."""


@dataclass(frozen=True)
class ProcessStarted:
    """Of the supervisor."""

    kind: ClassVar[str] = "process_started"
    role: str
    pid: int


@dataclass(frozen=True)
class ProcessEnded:
    """Of the supervisor."""

    kind: ClassVar[str] = "process_ended"
    role: str
    pid: int
    code: int
    """Exit code, or the negative number of the signal that killed it."""


Event = (
    RunStarted
    | RunEnded
    | RolloutStarted
    | RolloutDone
    | RolloutLost
    | GroupPut
    | GroupDropped
    | GroupDiscarded
    | BatchTaken
    | UpdateDone
    | VersionPublished
    | VersionApplied
    | CheckpointSaved
    | Evaluated
    | ProcessStarted
    | ProcessEnded
)


def encode(event: Event) -> Plain:
    """The plain form."""
    forms = _FIELDS[event.kind]
    return {"kind": event.kind, "v": [f.plain(getattr(event, n)) for n, f in forms.items()]}


def decode(value: object) -> Event:
    """The event of a plain form; a ValueError names the kind and field that are wrong."""
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"no event: kind is none of {sorted(_KINDS)}")
    forms = _FIELDS[kind]
    plain = value.get("v")
    if set(value) != {"kind", "v"} or not isinstance(plain, list) or len(plain) != len(forms):
        raise ValueError(f"{kind}: v is no list of {', '.join(forms)}")
    parsed: dict[str, Any] = {}
    for (name, form), field in zip(forms.items(), plain, strict=True):
        try:
            parsed[name] = form.parse(field)
        except ValueError as error:
            raise ValueError(f"{kind}: {name}: {error}") from error
    event = _KINDS[kind](**parsed)
    if encode(event) != value:
        raise ValueError(f"{kind}: {value['v']!r:.80} is not as encoding makes it")
    return event


class _Form(NamedTuple):
    """How the values of one type are put and read."""

    plain: Callable[[Any], Any]
    parse: Callable[[Any], Any]


def _of[T](kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.80} is no {kind.__name__}")
    return value


def _exactly(kind: type) -> _Form:
    return _Form(kind, lambda value: _of(kind, value))


def _digest(text: str) -> str | bytes:
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        return text
    return packed if len(packed) == 32 and packed.hex() == text else text


def _parse_digest(value: Any) -> str:
    if isinstance(value, bytes) and len(value) == 32:
        return value.hex()
    return _of(str, value)


def _parse_group(value: Any) -> GroupId:
    if len(_of(list, value)) != 2:
        raise ValueError(f"{value!r:.80} is not [task, prompt]")
    return GroupId(_of(str, value[0]), _of(int, value[1]))


def _groups(groups: tuple[GroupId, ...]) -> list[Any]:
    runs = groupby(groups, lambda group: group.task)
    return [[task, [group.prompt for group in run]] for task, run in runs]


def _parse_groups(value: Any) -> tuple[GroupId, ...]:
    groups: list[GroupId] = []
    for run in _of(list, value):
        if len(_of(list, run)) != 2:
            raise ValueError(f"{run!r:.80} is not [task, prompts]")
        groups += [_parse_group([run[0], prompt]) for prompt in _of(list, run[1])]
    return tuple(groups)


def _rate(value: float) -> Any:
    """A share of few is [how many, of how many]: half the bytes, and exact."""
    if 0 <= value <= 1:
        share = Fraction(value).limit_denominator(1 << 12)
        if float(share) == value:
            return [share.numerator, share.denominator]
    return float(value)


def _parse_rate(value: Any) -> float:
    if not isinstance(value, list):
        return _of(float, value)
    if len(value) != 2 or _of(int, value[0]) < 0 or _of(int, value[1]) < 1:
        raise ValueError(f"{value!r:.80} is not [how many, of how many]")
    return value[0] / value[1]


def _rates(rates: Mapping[str, float]) -> dict[str, Any]:
    return {label: _rate(value) for label, value in rates.items()}


def _parse_rates(value: Any) -> Mapping[str, float]:
    rates = {_of(str, k): _parse_rate(v) for k, v in _of(dict, value).items()}
    return types.MappingProxyType(rates)


_FORMS: Mapping[Any, _Form] = {
    int: _exactly(int),
    float: _exactly(float),
    str: _exactly(str),
    Digest: _Form(_digest, _parse_digest),
    RolloutKey: _Form(list, decode_key),
    GroupId: _Form(list, _parse_group),
    tuple[GroupId, ...]: _Form(_groups, _parse_groups),
    Mapping[str, float]: _Form(_rates, _parse_rates),
}


def _forms(kind: type[Event]) -> Mapping[str, _Form]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: _FORMS[hints[field.name]] for field in fields(kind)}


_KINDS: Mapping[str, type[Event]] = {kind.kind: kind for kind in typing.get_args(Event)}
_FIELDS = {name: _forms(kind) for name, kind in _KINDS.items()}
