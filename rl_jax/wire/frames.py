"""[N] What two peers say to each other: a length (uint32, big-endian) and that many msgpack bytes.

The one that connects begins with a hello, the other answers it with a welcome or with why not.
Every frame after that is a list: its kind, the sender's logical clock, then

    "call"    id, method, arguments     an id of None wants no answer
    "result"  id, value                 of the receiver's call `id`
    "error"   id, type name, text       likewise
    "cancel"  id                        nobody waits any more for the sender's call `id`
"""

import hmac
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgpack

PROTOCOL = "rl_jax"
VERSION = 1
HEADER = struct.Struct(">I")
MAX_FRAME = (1 << 30) + (1 << 20)
"""Bytes after the length: the largest group and what is said around it."""
MAX_HELLO = 1 << 12
"""Bytes of a hello or welcome: all that is read from a peer without a token."""
MAX_TEXT = 1 << 14
"""Characters of an error's text; the rest is cut off."""
MAX_CLOCK = 1 << 62


@runtime_checkable
class Clock(Protocol):
    """A logical clock: what a peer did before it sent something has a lower number than what
    happens after that arrived."""

    def tick(self) -> int:
        """The number of what happens now."""
        ...

    def witness(self, number: int, /) -> None:
        """Everything from now on is later than `number`."""
        ...


class Call(NamedTuple):
    clock: int
    id: int | None
    method: str
    arguments: list[Any]


class Result(NamedTuple):
    clock: int
    id: int
    value: Any


class Failure(NamedTuple):
    clock: int
    id: int
    name: str
    text: str


class Cancel(NamedTuple):
    clock: int
    id: int


Frame = Call | Result | Failure | Cancel
_KINDS: Mapping[str, type[Frame]] = {
    "call": Call,
    "result": Result,
    "error": Failure,
    "cancel": Cancel,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_TYPES = {"clock": int, "id": int, "method": str, "arguments": list, "name": str, "text": str}


class RemoteError(Exception):
    """An error of the other side of a type that does not travel: its name and its text."""


def pack(value: object) -> bytes:
    """The value as a frame; a ValueError where it is too large or no msgpack value."""
    try:
        data = msgpack.Packer().pack(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"cannot be sent: {error}") from error
    if len(data) > MAX_FRAME:
        raise ValueError(f"a message of {len(data)} bytes cannot be sent; at most {MAX_FRAME}")
    return HEADER.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    """The value of a frame's bytes after its length; a ValueError for what is not msgpack."""
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"not msgpack: {error}") from error


def size(header: bytes, most: int) -> int:
    """The length that a frame begins with; a ValueError above `most`."""
    (length,) = HEADER.unpack(header)
    if length > most:
        raise ValueError(f"a frame of {length} bytes; at most {most}")
    return length


def encode(frame: Frame) -> bytes:
    """The frame, packed; errors as `pack`."""
    return pack([_NAMES[type(frame)], *frame])


def decode(value: Any) -> Frame:
    """The frame of an unpacked value; a ValueError for anything that `encode` does not make."""
    named = isinstance(value, list) and value and isinstance(value[0], str)
    kind = _KINDS.get(value[0]) if named else None
    if kind is None or len(value) != 1 + len(kind._fields):
        raise ValueError("no call, result, error or cancel")
    for name, field in zip(kind._fields, value[1:], strict=True):
        if name == "id" and kind is Call and field is None:
            continue
        if name in _TYPES and type(field) is not _TYPES[name]:
            raise ValueError(f"{value[0]}: {name} is no {_TYPES[name].__name__}")
    if not 0 <= value[1] < MAX_CLOCK:
        raise ValueError(f"{value[0]}: clock {value[1]}")
    return kind(*value[1:])


def failure(clock: int, call: int, error: BaseException) -> Failure:
    """The frame that answers `call` with an error."""
    return Failure(clock, call, *encode_error(error))


def encode_error(error: BaseException) -> tuple[str, str]:
    """Type name and text."""
    return type(error).__name__, str(error)[:MAX_TEXT]


def decode_error(name: str, text: str, kinds: Iterable[type[Exception]]) -> Exception:
    """The error as one of `kinds`, found by name; a RemoteError where none is called so."""
    for kind in kinds:
        if kind.__name__ == name:
            return kind(text)
    return RemoteError(f"{name}: {text}")


def hello(token: str) -> bytes:
    """The frame with which a connection begins."""
    return pack({"protocol": PROTOCOL, "version": VERSION, "token": token})


def welcome(refused: str = "") -> bytes:
    """The answer to a hello; `refused` is empty, or says why the connection ends here."""
    return pack({"protocol": PROTOCOL, "version": VERSION, "refused": refused})


def check_hello(value: object, token: str) -> str:
    """Why the peer that sent this hello is refused; empty where it is not."""
    given = value.get("token") if isinstance(value, Mapping) else None
    if wrong := _other_protocol(value):
        return wrong
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), token.encode()):
        return "wrong token"
    return ""


def check_welcome(value: object) -> str:
    """Why there is no connection to the peer that sent this welcome; empty where there is."""
    refused = value.get("refused") if isinstance(value, Mapping) else None
    # A peer of another version says so itself, and in words that this side can show.
    if isinstance(refused, str) and refused:
        return refused[:MAX_TEXT]
    return _other_protocol(value)


def _other_protocol(value: object) -> str:
    if not isinstance(value, Mapping) or value.get("protocol") != PROTOCOL:
        return f"peer does not speak {PROTOCOL}; this is {PROTOCOL} protocol {VERSION}"
    if value.get("version") != VERSION:
        return f"peer speaks protocol {str(value.get('version'))[:20]}, this is {VERSION}"
    return ""
