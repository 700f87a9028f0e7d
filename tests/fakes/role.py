"""A program that an engine starts: `python -m tests.fakes.role [deaf] [portable] [PIPE]`.

It serves calls until TERM. `deaf` ignores TERM, `portable` does without what only Linux has; a byte
from PIPE is awaited before anything.
"""

import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.engine.base import CONTROL_FD, CONTROL_TOKEN, GroupSpec, ProcessSpec
from launch.engine.child import serve_control

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT)}


def process(*words: str, env: Mapping[str, str] | None = None) -> ProcessSpec:
    argv = (sys.executable, "-m", "tests.fakes.role", *words)
    return ProcessSpec(argv, {**ENV, **(env or {})})


def script(code: str, *words: str) -> ProcessSpec:
    """A process of plain Python that knows no engine."""
    return ProcessSpec((sys.executable, "-S", "-c", code, *words), ENV)


PAUSE = script("import signal; signal.pause()")


def deaf(pipe: str) -> ProcessSpec:
    """Ignores TERM and tells the named pipe that it does."""
    ignore = "import signal, sys; signal.signal(15, signal.SIG_IGN)"
    return script(f"{ignore}; open(sys.argv[1], 'w').write('.'); signal.pause()", pipe)


def group(name: str, *processes: ProcessSpec, grace_s: float = 20.0) -> GroupSpec:
    return GroupSpec(name, processes or (process(),), grace_s)


async def echo(value: Any) -> Any:
    return value


async def environment() -> dict[str, str]:
    return dict(os.environ)


async def session() -> list[int]:
    return [os.getpid(), os.getsid(0), os.getpgrp()]


async def say(text: str) -> None:
    print(text)
    print(f"{text} (stderr)", file=sys.stderr)


async def fail(text: str) -> None:
    raise KeyError(text)


async def hang() -> None:
    await asyncio.Event().wait()


async def big(size: int) -> bytes:
    return bytes(size)


async def odd() -> Any:
    return object()


async def grandchild() -> int:
    """The pid of a child in the same session that ignores TERM."""
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    argv = [sys.executable, "-S", "-c", code]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child.pid


async def hold_the_gil(pipe: str) -> None:
    """Tells the named pipe, then holds the interpreter's lock for good."""
    hold = ctypes.PyDLL(None).sleep
    Path(pipe).write_bytes(b".")
    hold(1000)


async def leave(code: int) -> None:
    os._exit(code)


FUNCTIONS = {
    f.__name__: f
    for f in (
        echo,
        environment,
        session,
        say,
        fail,
        hang,
        big,
        odd,
        grandchild,
        hold_the_gil,
        leave,
    )
}


async def main() -> None:
    listener = socket.socket(fileno=os.dup(int(os.environ[CONTROL_FD])))
    where = [listener.getsockname(), os.environ[CONTROL_TOKEN]]
    listener.close()

    async def control() -> list[str]:
        return where

    await serve_control({**FUNCTIONS, "control": control})


if __name__ == "__main__":
    for word in sys.argv[1:]:
        if word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word == "portable":
            del fcntl.F_SETSIG
        else:
            os.read(os.open(word, os.O_RDONLY), 1)
    asyncio.run(main())
