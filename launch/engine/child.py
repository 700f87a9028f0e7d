"""[H] The inside of a process that an engine started: it serves calls and dies with its parent."""

import asyncio
import fcntl
import hmac
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from launch.engine.base import CONTROL_FD, CONTROL_TOKEN
from launch.engine.wire import frame, read_message

Functions = Mapping[str, Callable[..., Awaitable[Any]]]

REQUEST_S = 10.0
"""How long a caller may take to send its request."""
_LIFELINE = 0
"""Standard input: nothing is ever written to it, and its end means that the parent is gone."""


@cache
def die_with_parent() -> None:
    """`follow_parent` in a process of an engine. Raises RuntimeError outside of one."""
    if CONTROL_FD not in os.environ:
        raise RuntimeError(f"{CONTROL_FD} is not set: this program is started by an engine")
    follow_parent()


def follow_parent() -> None:
    """From now on the end of the parent, SIGKILL included, kills this process and its group.

    Standard input must be a pipe from the parent into which nothing is written. To be called once,
    before anything slow is imported; a parent that is gone by then counts too.
    """
    if hasattr(fcntl, "F_SETSIG"):
        # Linux: the kernel itself sends the signal, also where a thread never lets go of the GIL.
        fcntl.fcntl(_LIFELINE, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(_LIFELINE, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(_LIFELINE, fcntl.F_GETFL)
        fcntl.fcntl(_LIFELINE, fcntl.F_SETFL, flags | os.O_ASYNC)
    threading.Thread(target=_await_end_of_parent, name="lifeline", daemon=True).start()


def _await_end_of_parent() -> None:
    while os.read(_LIFELINE, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


async def serve_control(functions: Functions) -> None:
    """Serves `functions` by name, each call as a task, until it is cancelled; calls
    `die_with_parent`.

    What a function raises is the caller's; arguments and results are what msgpack knows. A function
    that takes longer than its caller waits is cancelled. To be called once.
    """
    die_with_parent()
    listener = socket.socket(fileno=int(os.environ.pop(CONTROL_FD)))
    token = os.environ.pop(CONTROL_TOKEN)
    listener.setblocking(False)
    listener.set_inheritable(False)
    with listener:
        async with asyncio.TaskGroup() as calls:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                calls.create_task(_serve(connection, functions, token))


async def _serve(connection: socket.socket, functions: Functions, token: str) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        async with asyncio.timeout(REQUEST_S):
            request = await read_message(reader)
        writer.write(await _answer(request, functions, token))
        await writer.drain()
    except ValueError as error:
        writer.write(frame({"error": str(error)}))
    except (OSError, EOFError):
        pass  # The caller went away, or took too long to ask; it knows.
    finally:
        writer.close()


async def _answer(request: Mapping[str, Any], functions: Functions, token: str) -> bytes:
    if not hmac.compare_digest(str(request.get("token")).encode(), token.encode()):
        raise ValueError("wrong token")
    match request:
        case {
            "function": str(name),
            "arguments": dict(arguments),
            "deadline": int() | float() as deadline,
        } if name in functions:
            try:
                async with asyncio.timeout(deadline):
                    return frame({"result": await functions[name](**arguments)})
            except Exception as error:  # whatever it is, the caller asked for it
                return frame({"error": f"{type(error).__name__}: {error}"})
        case {"function": str(name)} if name not in functions:
            raise ValueError(f"no function {name}; there are {', '.join(sorted(functions))}")
        case _:
            raise ValueError("a call is {token, function, arguments, deadline}")
