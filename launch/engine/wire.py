"""[H] Control messages: a length (uint32, little-endian), then that many bytes of one msgpack map.

One connection carries one call: {token, function, arguments, deadline}, answered by {result} or
{error}.
"""

import asyncio
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

MAX_MESSAGE = 16 << 20
"""Bytes of one payload."""
_LENGTH = struct.Struct("<I")


def frame(message: Mapping[str, Any]) -> bytes:
    """Raises ValueError for what msgpack does not know, and for too many bytes."""
    try:
        payload = msgpack.Packer().pack(message)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"not a control message: {error}") from error
    return _LENGTH.pack(_allowed(len(payload))) + payload


def unframed(message: bytes) -> dict[str, Any]:
    """What `frame` was given, where all of its bytes are there."""
    return msgpack.unpackb(memoryview(message)[_LENGTH.size :])


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises ValueError for anything but a map of at most MAX_MESSAGE bytes, EOFError (asyncio's
    IncompleteReadError) where the stream ends before it does."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    message = msgpack.unpackb(await reader.readexactly(_allowed(length)))
    if not isinstance(message, dict):
        raise ValueError(f"a control message is a map, not {type(message).__name__}")
    return message


async def exchange(socket: Path, request: bytes) -> dict[str, Any]:
    """One call over a connection of its own. Raises OSError and EOFError where the other side is
    gone, ValueError where its answer is none."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(request)
        await writer.drain()
        return await read_message(reader)
    finally:
        writer.close()


def _allowed(length: int) -> int:
    if length > MAX_MESSAGE:
        raise ValueError(f"a control message of {length} bytes; at most {MAX_MESSAGE}")
    return length
