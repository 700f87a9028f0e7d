"""[H] What starts one process of a group on a node and keeps it: bytes in, bytes out, never jax.

An actor of Ray's holds it (`launch.engine.ray`). When the actor dies, so does the process, which
notices (`launch.engine.child`); when nobody asks for the process any more, the keeper ends both.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.engine.base import CallFailed, Exited, Group, GroupDied, GroupSpec, ProcessSpec
from launch.engine.local import LocalEngine
from launch.engine.wire import frame, unframed
from launch.env_table import PLACEMENT
from launch.ports import first_taken

LEASE_S = 30.0
"""How long a process lives without anybody asking whether it does."""
_RAYS = frozenset({"OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV"})
"""What Ray sets in its workers besides RAY_*; among those is the cluster's token."""


def environment(own: Mapping[str, str], callers: Mapping[str, str]) -> dict[str, str]:
    """What a process on this node inherits: the node's environment, and what the caller's has in
    addition; without what is Ray's, and what would place it on another node's devices."""
    nodes = {name: value for name, value in own.items() if name not in _RAYS}
    both = {name: value for name, value in callers.items() if name not in PLACEMENT} | nodes
    return {name: value for name, value in both.items() if not name.startswith("RAY_")}


class Keeper:
    """Of one process, from `start` on."""

    def __init__(self, run_dir: str, cwd: str, callers: bytes) -> None:
        with suppress(
            OSError
        ):  # what is relative means the same here, where there is the same disk
            os.chdir(cwd)
        self._run_dir = Path(run_dir)
        self._environ = environment(os.environ, unframed(callers))
        self._engine: LocalEngine | None = None
        self._group: Group
        self._asked = 0.0
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, request: bytes) -> bytes:
        """{name, argv, env, ports, grace_s, index} -> {pid}; {errno, error} where it cannot be
        started, {open} where this node lets anybody in, {unseen} where it has another disk, {taken}
        with the first of `ports` that others have here."""
        if os.environ.get("RAY_AUTH_MODE") != "token":
            return frame({"open": True})
        # Before anything is written: the engine would make a directory of that name here.
        if not (self._run_dir / "FORMAT").is_file():
            return frame({"unseen": True})
        told = unframed(request)
        if found := first_taken(told["ports"]):
            return frame({"taken": found[0]})
        self._engine = LocalEngine(self._run_dir, self._environ)
        process = ProcessSpec(tuple(told["argv"]), told["env"])
        spec = GroupSpec(told["name"], (process,), told["grace_s"], first=told["index"])
        # Ray's workers block it, and children inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._group = await self._engine.start_group(spec)
        except OSError as error:
            return frame({"errno": error.errno, "error": error.strerror})
        self._asked = asyncio.get_running_loop().time()
        self._tasks = [asyncio.create_task(task) for task in (_code(self._group), self._lease())]
        return frame({"pid": self._group.pids[0]})

    async def wait(self, patience_s: float) -> bytes:
        """{code} once the process has exited; {} after `patience_s`."""
        self._asked = asyncio.get_running_loop().time()
        done, _ = await asyncio.wait(self._tasks[:1], timeout=patience_s)
        return frame({"code": self._tasks[0].result()} if done else {})

    async def call(self, request: bytes) -> bytes:
        """{function, arguments, deadline} -> {result}, {failed}, {refused}, {died} or {late}."""
        told = unframed(request)
        try:
            arguments, deadline = told["arguments"], told["deadline"]
            return frame(
                {"result": await self._group.call(told["function"], arguments, deadline=deadline)}
            )
        except CallFailed as error:
            return frame({"failed": str(error)})
        except ValueError as error:
            return frame({"refused": str(error)})
        except GroupDied:
            return frame({"died": True})
        except TimeoutError:
            return frame({"late": True})

    async def kill(self, grace_s: float) -> bytes:
        """{} once the process is gone, {stuck} where it does not go."""
        try:
            await self._group.kill(grace_s)
        except TimeoutError as error:
            return frame({"stuck": str(error)})
        return frame({})

    async def close(self) -> None:
        """Kills the process, if it still is, and leaves no file."""
        if self._engine:
            await self._engine.close()

    async def _lease(self) -> None:
        loop = asyncio.get_running_loop()
        while (left := self._asked + LEASE_S - loop.time()) > 0:
            await asyncio.sleep(left)
        try:
            await self.close()
        finally:
            os._exit(1)


async def _code(group: Group) -> int:
    codes = [event.code async for event in group.events() if isinstance(event, Exited)]
    return codes[0]
