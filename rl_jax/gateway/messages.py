"""[N] Requests, completions and segments as msgpack values: arrays are bytes of a declared dtype.

An array is [dtype, bytes], little-endian. Log-probabilities are float32. A completion has its
experts, in the codec's form, only where they are recorded. Decoding answers what encoding does not
make with a ValueError that names the field.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_jax.gateway.protocol import Completion, Finish, Request
from rl_jax.trajectories.codec import decode_choices, encode_choices, parse_count, parse_real
from rl_jax.trajectories.types import Origin, Segment

MAX_ENTRIES = 1 << 22
"""Of one array."""

_IDS, _LOGPROBS, _ORIGINS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_ORIGIN = tuple(Origin)


def encode_request(request: Request) -> list[Any]:
    """The plain form."""
    return [
        _encode(request.new_tokens, _IDS),
        request.max_new_tokens,
        _encode(sorted(request.stop_ids), _IDS),
        float(request.temperature),
        float(request.top_p),
        request.training,
    ]


def decode_request(value: object) -> Request:
    """The request of a plain form, with the checks of every request."""
    new, most, stop, temperature, top_p, training = _fields("request", value, 6)
    return Request(
        new_tokens=tuple(_decode("new_tokens", new, _IDS).tolist()),
        max_new_tokens=parse_count("max_new_tokens", most),
        stop_ids=frozenset(_decode("stop_ids", stop, _IDS).tolist()),
        temperature=parse_real("temperature", temperature),
        top_p=parse_real("top_p", top_p),
        training=_flag("training", training),
    )


def encode_completion(completion: Completion) -> list[Any]:
    """The plain form."""
    return [
        _encode(completion.tokens, _IDS),
        _encode(completion.logprobs, _LOGPROBS),
        _encode(completion.raw_logprobs, _LOGPROBS),
        _encode(completion.versions, _IDS),
        completion.finish.value,
        *([] if completion.choices is None else [encode_choices(completion.choices)]),
    ]


def decode_completion(value: object) -> Completion:
    """The completion of a plain form."""
    more = isinstance(value, list) and len(value) == 6
    fields = _fields("completion", value, 6 if more else 5)
    tokens, logprobs, raw_logprobs, versions, finish, *recorded = fields
    ids, sampled = _decode("tokens", tokens, _IDS), _decode("versions", versions, _IDS)
    used, raw = _decode("logprobs", logprobs, _LOGPROBS), _decode("raw", raw_logprobs, _LOGPROBS)
    if not len(ids) == len(sampled) == len(used) == len(raw):
        raise ValueError(f"completion of {len(ids)} tokens: its arrays do not fit together")
    columns = (tuple(array.tolist()) for array in (ids, used, raw, sampled))
    choices = decode_choices(recorded[0], MAX_ENTRIES) if recorded else None
    return Completion(*columns, finish=Finish(finish), choices=choices)


def encode_segments(segments: Sequence[Segment]) -> list[Any]:
    """The plain form: one array a field."""
    return [
        _encode([s.start for s in segments], _IDS),
        _encode([s.end for s in segments], _IDS),
        _encode([s.version for s in segments], _IDS),
        _encode([_ORIGIN.index(s.origin) for s in segments], _ORIGINS),
    ]


def decode_segments(value: object) -> tuple[Segment, ...]:
    """The segments of a plain form."""
    start, end, version, origin = _fields("segments", value, 4)
    columns = (
        _decode("segments", start, _IDS).tolist(),
        _decode("segments", end, _IDS).tolist(),
        _decode("segments", version, _IDS).tolist(),
        _decode("segments", origin, _ORIGINS).tolist(),
    )
    if len({len(column) for column in columns}) != 1 or max(columns[3], default=0) >= len(_ORIGIN):
        raise ValueError("segments: columns that do not fit together")
    rows = zip(*columns, strict=True)
    return tuple(Segment(a, b, version, _ORIGIN[how]) for a, b, version, how in rows)


def _encode(values: Sequence[float], dtype: np.dtype) -> list[Any]:
    return [dtype.name, np.asarray(values, dtype).tobytes()]


def _decode(name: str, value: object, dtype: np.dtype) -> np.ndarray:
    declared, data = _fields(name, value, 2)
    if declared != dtype.name or not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise ValueError(f"{name}: no bytes of {dtype.name}")
    if len(data) > MAX_ENTRIES * dtype.itemsize:
        raise ValueError(f"{name}: {len(data) // dtype.itemsize} entries; at most {MAX_ENTRIES}")
    return np.frombuffer(data, dtype)


def _fields(name: str, value: object, count: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError(f"{name}: a list of {count} expected")
    return value


def _flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name}: {value!r} is neither true nor false")
    return value
