"""[N] Groups and trajectories as plain msgpack values: no pickle, compact, bounded sizes.

A trajectory is a list of its fields in the order of `encode_trajectory`. What follows from another
field is left out: the loss mask is where versions are, and only sampled tokens have a
log-probability. Choices of experts are a last field that is there only where they were recorded.
Decoding takes exactly what encoding makes and answers anything else with one
ValueError that names the field.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np

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

MAX_TOKENS = 1 << 22
"""Tokens, and segments, of one trajectory."""
MAX_MEMBERS = 1 << 12
"""Members, and failures, of one group."""
MAX_TEXT = 1 << 14
"""Characters of a name or reason."""
MAX_BYTES = 1 << 30
"""Bytes of one packed group."""

Plain = dict[str, Any]

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_CHOICES = (np.dtype("u1"), np.dtype("<u2"))
_GROUP = ("task", "prompt", "members", "failures")
# An origin or status is its place here.
_ORIGINS = (Origin.PREFILL, Origin.DECODE, Origin.RECOMPUTE)
_STATUSES = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)


def encode_trajectory(trajectory: Trajectory) -> list[Any]:
    """The plain form; a ValueError names an array whose dtype is not the declared one, and a
    log-probability of a token that was not sampled."""
    mask = _array("loss_mask", trajectory.loss_mask, np.dtype("bool"))
    logprobs = _array("behavior_logprobs", trajectory.behavior_logprobs, _FLOAT32)
    if logprobs[~mask].any():
        raise ValueError("behavior_logprobs: not 0 where no token was sampled")
    return [
        list(trajectory.key),
        _array("tokens", trajectory.tokens, _INT32).tobytes(),
        _runs(_array("versions", trajectory.versions, _INT32)),
        logprobs[mask].tobytes(),
        [[s.start, s.end, s.version, _ORIGINS.index(s.origin)] for s in trajectory.segments],
        float(trajectory.temperature),
        None if trajectory.reward is None else float(trajectory.reward),
        _STATUSES.index(trajectory.status),
        trajectory.reason,
        trajectory.turns,
        trajectory.copy_of,
        *([] if trajectory.choices is None else [encode_choices(trajectory.choices)]),
    ]


def decode_trajectory(value: object) -> Trajectory:
    """The trajectory of a plain form."""
    more = isinstance(value, list | tuple) and len(value) == 12
    fields = _tuple("trajectory", value, 12 if more else 11)
    key, tokens, versions, logprobs, segments, *rest = fields
    temperature, reward, status, reason, turns, original, *recorded = rest
    stream = _decode_array("tokens", tokens, _INT32)
    column = _decode_runs(versions, len(stream))
    mask = column != NOT_SAMPLED
    return Trajectory(
        key=decode_key(key),
        tokens=stream,
        loss_mask=mask,
        behavior_logprobs=_decode_logprobs(logprobs, mask),
        versions=column,
        segments=tuple(
            _decode_segment(s, len(stream)) for s in _items("segments", segments, MAX_TOKENS)
        ),
        temperature=parse_real("temperature", temperature),
        reward=_optional(parse_real, "reward", reward),
        status=_place("status", _STATUSES, status),
        reason=_text("reason", reason),
        turns=parse_count("turns", turns),
        copy_of=_optional(parse_count, "copy_of", original),
        choices=decode_choices(recorded[0], len(stream)) if recorded else None,
    )


def encode_choices(choices: np.ndarray) -> list[Any]:
    """[bytes of an entry, layers, of a token, bytes] of uint8 or uint16[n, layers, k]."""
    if choices.dtype not in _CHOICES or choices.ndim != 3 or 0 in choices.shape[1:]:
        found = f"{choices.dtype}{list(choices.shape)}"
        raise ValueError(f"choices are {found}; uint8 or uint16[n, M, k] expected")
    little = choices.astype(choices.dtype.newbyteorder("<"), copy=False)
    return [choices.itemsize, *choices.shape[1:], little.tobytes()]


def decode_choices(value: object, most: int) -> np.ndarray:
    """The choices of a plain form, of at most `most` tokens."""
    size, layers, chosen, data = _tuple("choices", value, 4)
    dtype = next((d for d in _CHOICES if type(size) is int and d.itemsize == size), None)
    each = parse_count("choices", layers) * parse_count("choices", chosen)
    if dtype is None or not each or not isinstance(data, bytes) or len(data) % (size * each):
        raise ValueError(f"choices: no bytes of {size!r} for {layers} x {chosen} a token")
    if (count := len(data) // (size * each)) > most:
        raise ValueError(f"choices of {count} tokens; at most {most}")
    flat = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))
    return flat.reshape(count, layers, chosen)


def encode_group(group: Group) -> Plain:
    """The plain form; errors as `encode_trajectory`. A padding copy is the sample that it repeats;
    a ValueError names one that differs from it."""
    originals: dict[int, Trajectory] = {}
    return {
        "task": group.task,
        "prompt": group.prompt,
        "members": [_encode_member(m, originals) for m in group.members],
        "failures": [list(f) for f in group.failures],
    }


def decode_group(value: object) -> Group:
    """The group of a plain form; its members must be rollouts of its own prompt."""
    fields = _record("group", value, _GROUP)
    originals: dict[int, Trajectory] = {}
    members = _items("members", fields["members"], MAX_MEMBERS)
    group = Group(
        task=_text("task", fields["task"]),
        prompt=parse_count("prompt", fields["prompt"]),
        members=tuple(_decode_member(m, originals) for m in members),
        failures=tuple(
            _decode_failure(f) for f in _items("failures", fields["failures"], MAX_MEMBERS)
        ),
    )
    for member in group.members:
        if member.key[:2] != (group.task, group.prompt):
            raise ValueError(f"members: {member.key} is no rollout of this group's prompt")
    return group


def pack_group(group: Group) -> bytes:
    """The group as msgpack bytes."""
    return msgpack.Packer().pack(encode_group(group))


def unpack_group(data: bytes) -> Group:
    """The group of msgpack bytes."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"group of {len(data)} bytes; at most {MAX_BYTES}")
    try:
        value = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"group is not msgpack: {error}") from error
    return decode_group(value)


def decode_key(value: object) -> RolloutKey:
    """The key of [task, prompt, sample, attempt]."""
    task, prompt, sample, attempt = _tuple("key", value, 4)
    numbers = (parse_count("key", n) for n in (prompt, sample, attempt))
    return RolloutKey(_text("key", task), *numbers)


def _encode_member(member: Trajectory, originals: dict[int, Trajectory]) -> list[Any] | int:
    if member.copy_of is None:
        originals[member.key.sample] = member
        return encode_trajectory(member)
    original = originals.get(member.copy_of)
    if original is None or encode_trajectory(copy_of(original)) != encode_trajectory(member):
        raise ValueError(f"members: {member.key} repeats no member before it")
    return member.copy_of


def _decode_member(value: object, originals: dict[int, Trajectory]) -> Trajectory:
    if type(value) is int:
        if value not in originals:
            raise ValueError(f"members: a copy of sample {value}, which is not before it")
        return copy_of(originals[value])
    member = decode_trajectory(value)
    if member.copy_of is not None:
        raise ValueError(f"members: {member.key} is a copy; its sample alone expected")
    originals[member.key.sample] = member
    return member


def _array(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; {dtype.name}[T] expected")
    return array.astype(dtype, copy=False)


def _decode_array(name: str, data: object, dtype: np.dtype) -> np.ndarray:
    if not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise ValueError(f"{name} does not hold the bytes of whole entries of {dtype.name}")
    if len(data) > MAX_TOKENS * dtype.itemsize:
        raise ValueError(f"{name} has {len(data) // dtype.itemsize} entries; at most {MAX_TOKENS}")
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def _decode_logprobs(data: object, mask: np.ndarray) -> np.ndarray:
    sampled = _decode_array("behavior_logprobs", data, _FLOAT32)
    count = int(mask.sum())
    if len(sampled) != count:
        raise ValueError(f"behavior_logprobs has {len(sampled)} entries for {count} sampled tokens")
    if not np.isfinite(sampled).all():
        raise ValueError("behavior_logprobs holds a number that is not finite")
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = sampled
    return logprobs


def _runs(column: np.ndarray) -> list[int]:
    """[length, value, length, value, ...] of runs of equal values."""
    starts = np.flatnonzero(np.diff(column, prepend=column[:1] - 1))
    lengths = np.diff(starts, append=len(column))
    return np.stack([lengths, column[starts]], axis=1).ravel().tolist()


def _decode_runs(value: object, length: int) -> np.ndarray:
    numbers = _items("versions", value, 2 * length)
    lengths, values = numbers[::2], numbers[1::2]
    if len(lengths) != len(values) or not all(type(n) is int for n in numbers):
        raise ValueError("versions: a list of length, version, length, version, ... expected")
    if min(lengths, default=1) < 1 or sum(lengths) != length:
        raise ValueError(f"versions: runs of {sum(lengths)} tokens for {length}")
    if not all(NOT_SAMPLED <= v < 1 << 31 for v in values):
        raise ValueError(f"versions: one is outside [{NOT_SAMPLED}, 2^31)")
    if any(a == b for a, b in pairwise(values)):
        raise ValueError("versions: two runs of one version in a row")
    return np.repeat(np.array(values, np.int32), lengths)


def _decode_segment(value: object, length: int) -> Segment:
    start, end, version, origin = _tuple("segments", value, 4)
    if parse_count("segments", start) > parse_count("segments", end) or end > length:
        raise ValueError(f"segments: [{start}, {end}) is no range of {length} tokens")
    return Segment(
        start, end, parse_count("segments", version), _place("segments", _ORIGINS, origin)
    )


def _decode_failure(value: object) -> tuple[int, str]:
    sample, reason = _tuple("failures", value, 2)
    return parse_count("failures", sample), _text("failures", reason)


def _record(name: str, value: object, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) != set(keys):
        found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise ValueError(f"{name}: {found}; a map of {sorted(keys)} expected")
    return value


def _items(name: str, value: object, most: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise ValueError(f"{name}: a list of at most {most} expected")
    return value


def _tuple(name: str, value: object, length: int) -> Sequence[Any]:
    if len(_items(name, value, length)) != length:
        raise ValueError(f"{name}: a list of {length} expected")
    return _items(name, value, length)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{name}: text of at most {MAX_TEXT} characters expected")
    return value


def parse_count(name: str, value: object) -> int:
    """A whole number from 0 up; a ValueError names `name`."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {value!r} is not a whole number from 0 up")
    return value


def parse_real(name: str, value: object) -> float:
    """A finite float; a ValueError names `name`."""
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a finite float")
    return value


def _place[E](name: str, kinds: Sequence[E], value: object) -> E:
    if parse_count(name, value) >= len(kinds):
        raise ValueError(f"{name}: {value} is none of the {len(kinds)} kinds")
    return kinds[parse_count(name, value)]


def _optional[T](parse: Callable[[str, object], T], name: str, value: object) -> T | None:
    return None if value is None else parse(name, value)
