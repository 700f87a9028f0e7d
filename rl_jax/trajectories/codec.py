"""[N] Groups and trajectories as plain msgpack values: no pickle, declared dtypes, bounded sizes.

An array is {"dtype": name, "shape": [n], "data": little-endian bytes}. Decoding takes exactly what
encoding makes and answers anything else with one ValueError that names the field.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from rl_jax.trajectories.types import Group, Origin, RolloutKey, Segment, Status, Trajectory

MAX_TOKENS = 1 << 22
"""Tokens, and segments, of one trajectory."""
MAX_MEMBERS = 1 << 12
"""Members, and failures, of one group."""
MAX_TEXT = 1 << 14
"""Characters of a name or reason."""
MAX_BYTES = 1 << 30
"""Bytes of one packed group."""

Plain = dict[str, Any]

_DTYPES = {
    "tokens": np.dtype("<i4"),
    "loss_mask": np.dtype("bool"),
    "behavior_logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
}
_SCALARS = ("key", "segments", "temperature", "reward", "status", "reason", "turns", "copy_of")
_GROUP = ("task", "prompt", "members", "failures")


def encode_trajectory(trajectory: Trajectory) -> Plain:
    """The plain form; a ValueError names an array whose dtype is not the declared one."""
    arrays = {name: _encode_array(name, getattr(trajectory, name)) for name in _DTYPES}
    return arrays | {
        "key": list(trajectory.key),
        "segments": [[s.start, s.end, s.version, s.origin.value] for s in trajectory.segments],
        "temperature": float(trajectory.temperature),
        "reward": None if trajectory.reward is None else float(trajectory.reward),
        "status": trajectory.status.value,
        "reason": trajectory.reason,
        "turns": trajectory.turns,
        "copy_of": trajectory.copy_of,
    }


def decode_trajectory(value: object) -> Trajectory:
    """The trajectory of a plain form."""
    fields = _record("trajectory", value, (*_DTYPES, *_SCALARS))
    tokens = _decode_array("tokens", fields["tokens"])
    return Trajectory(
        key=decode_key(fields["key"]),
        tokens=tokens,
        loss_mask=_decode_array("loss_mask", fields["loss_mask"]),
        behavior_logprobs=_decode_array("behavior_logprobs", fields["behavior_logprobs"]),
        versions=_decode_array("versions", fields["versions"]),
        segments=tuple(
            _decode_segment(s, len(tokens))
            for s in _items("segments", fields["segments"], MAX_TOKENS)
        ),
        temperature=_real("temperature", fields["temperature"]),
        reward=_optional(_real, "reward", fields["reward"]),
        status=_member("status", Status, fields["status"]),
        reason=_text("reason", fields["reason"]),
        turns=_count("turns", fields["turns"]),
        copy_of=_optional(_count, "copy_of", fields["copy_of"]),
    )


def encode_group(group: Group) -> Plain:
    """The plain form; errors as `encode_trajectory`."""
    return {
        "task": group.task,
        "prompt": group.prompt,
        "members": [encode_trajectory(m) for m in group.members],
        "failures": [list(f) for f in group.failures],
    }


def decode_group(value: object) -> Group:
    """The group of a plain form; its members must be rollouts of its own prompt."""
    fields = _record("group", value, _GROUP)
    members = _items("members", fields["members"], MAX_MEMBERS)
    group = Group(
        task=_text("task", fields["task"]),
        prompt=_count("prompt", fields["prompt"]),
        members=tuple(decode_trajectory(m) for m in members),
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
    numbers = (_count("key", n) for n in (prompt, sample, attempt))
    return RolloutKey(_text("key", task), *numbers)


def _encode_array(name: str, array: np.ndarray) -> Plain:
    if array.dtype != _DTYPES[name] or array.ndim != 1:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; {_DTYPES[name]}[T] expected")
    little = array.astype(_DTYPES[name], copy=False)
    return {"dtype": _DTYPES[name].name, "shape": [len(array)], "data": little.tobytes()}


def _decode_array(name: str, value: object) -> np.ndarray:
    fields = _record(name, value, ("dtype", "shape", "data"))
    dtype = _DTYPES[name]
    (length,) = _tuple(name, fields["shape"], 1)
    data = fields["data"]
    if fields["dtype"] != dtype.name:
        raise ValueError(f"{name} has dtype {fields['dtype']!r}; {dtype.name} expected")
    if _count(name, length) > MAX_TOKENS:
        raise ValueError(f"{name} has {length} entries; at most {MAX_TOKENS}")
    if not isinstance(data, bytes) or len(data) != length * dtype.itemsize:
        raise ValueError(f"{name} does not hold the bytes of {length} entries of {dtype.name}")
    if dtype == np.bool_ and length and np.frombuffer(data, np.uint8).max() > 1:
        raise ValueError(f"{name} holds a byte that is neither 0 nor 1")
    array = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} holds a number that is not finite")
    return array


def _decode_segment(value: object, length: int) -> Segment:
    start, end, version, origin = _tuple("segments", value, 4)
    if _count("segments", start) > _count("segments", end) or end > length:
        raise ValueError(f"segments: [{start}, {end}) is no range of {length} tokens")
    return Segment(start, end, _count("segments", version), _member("segments", Origin, origin))


def _decode_failure(value: object) -> tuple[int, str]:
    sample, reason = _tuple("failures", value, 2)
    return _count("failures", sample), _text("failures", reason)


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


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {value!r} is not a whole number from 0 up")
    return value


def _real(name: str, value: object) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a finite float")
    return value


def _member[E](name: str, kind: Callable[[Any], E], value: object) -> E:
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _optional[T](parse: Callable[[str, object], T], name: str, value: object) -> T | None:
    return None if value is None else parse(name, value)
