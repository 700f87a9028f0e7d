"""[H] The engine of one machine: every process is a child of this one, in a session of its own."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from launch.engine.base import (
    CONTROL_FD,
    CONTROL_TOKEN,
    CallFailed,
    Exited,
    GroupDied,
    GroupSpec,
    ProcessEvent,
    ProcessSpec,
    Resources,
    child_env,
)
from launch.engine.history import History, claim
from launch.engine.wire import exchange, frame

REAP_S = 30.0
"""How long a process may take to end after KILL: one inside a driver cannot be killed."""
_SOCKETS = "/tmp"  # A socket's path has at most 107 bytes; TMPDIR may be longer.
_DEVICE_FILES = {"gpu": ("nvidia[0-9]*",), "tpu": ("accel[0-9]*", "vfio/[0-9]*")}


class _Member(NamedTuple):
    process: asyncio.subprocess.Process
    lifeline: int
    """Our end of the pipe that is the process's standard input."""
    control: Path
    log: Path

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group, also when its leader is gone."""
        with suppress(ProcessLookupError, PermissionError):  # the latter for zombies on macOS
            os.killpg(self.process.pid, number)


class LocalGroup:
    """`Group` of child processes; made by `LocalEngine`."""

    def __init__(self, spec: GroupSpec, members: Sequence[_Member], token: str) -> None:
        self._spec, self._members, self._token = spec, members, token
        self._history = History(spec.name, self.pids, spec.grace_s, self.kill)
        self._terminated = False
        self._watches = [asyncio.create_task(self._watch(i)) for i in range(len(members))]

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    @property
    def alive(self) -> bool:
        return not self._history.over

    def log(self, index: int) -> Path:
        return self._members[index].log

    async def call(self, function: str, arguments: Mapping[str, Any], *, deadline: float) -> Any:
        request = {
            "token": self._token,
            "function": function,
            "arguments": dict(arguments),
            "deadline": deadline,
        }
        try:
            async with asyncio.timeout(deadline):
                reply = await self._exchange(function, frame(request))
        except TimeoutError:
            raise TimeoutError(
                f"{self.name}: no answer to {function}() within {deadline:g} s"
            ) from None
        if "result" not in reply:
            raise CallFailed(f"{self.name}: {function}(): {reply.get('error', 'an empty answer')}")
        return reply["result"]

    def events(self) -> AsyncIterator[ProcessEvent]:
        return self._history.events()

    async def kill(self, grace_s: float) -> None:
        if not self._terminated:
            self._terminated = True
            self._signal(signal.SIGTERM)
        if await self._history.ends_within(grace_s):
            return
        self._signal(signal.SIGKILL)
        if not await self._history.ends_within(REAP_S):
            pids = [pid for i, pid in enumerate(self.pids) if i not in self._history.exits]
            raise TimeoutError(f"{self.name}: pids {pids} did not end {REAP_S:g} s after KILL")

    async def _exchange(self, function: str, request: bytes) -> dict[str, Any]:
        if self._history.exits:
            raise GroupDied(self._history.obituary())
        try:
            return await exchange(self._members[0].control, request)
        except ValueError as error:
            raise CallFailed(f"{self.name}: the answer to {function}(): {error}") from error
        except (OSError, EOFError):
            # The process no longer serves, so it is about to end: then it is known how.
            await asyncio.wait([self._watches[0]])
            raise GroupDied(self._history.obituary()) from None

    def _signal(self, number: signal.Signals) -> None:
        for index, member in enumerate(self._members):
            if index not in self._history.exits:
                member.signal(number)

    async def _watch(self, index: int) -> None:
        member = self._members[index]
        code = await member.process.wait()
        os.close(member.lifeline)
        member.signal(signal.SIGKILL)  # what it left behind
        self._history.tell(Exited(index, member.process.pid, code))


class LocalEngine:
    """`Engine` of child processes; what they print goes to `run_dir`/logs/GROUP-INDEX.log.

    They inherit `environ`. Used on one event loop. A child is not told to end when this process is
    killed: it notices (`launch.engine.child`).
    """

    def __init__(self, run_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="rl-jax-", dir=_SOCKETS))  # mode 0700
        self._numbers = count()
        self._token = secrets.token_hex(16)
        self._groups: dict[str, LocalGroup | None] = {}
        self._closed = False

    async def start_group(self, spec: GroupSpec) -> LocalGroup:
        claim(spec.name, self._groups, closed=self._closed)
        members: list[_Member] = []
        try:
            for index, process in enumerate(spec.processes, spec.first):
                members.append(await self._spawn(f"{spec.name}-{index}", process))
            if self._closed:
                raise RuntimeError(f"{spec.name}: the engine was closed meanwhile")
        except BaseException:
            del self._groups[spec.name]
            await LocalGroup(spec, members, self._token).kill(0.0)
            raise
        group = self._groups[spec.name] = LocalGroup(spec, members, self._token)
        return group

    def resources(self) -> Resources:
        """Cores this process may use; devices by the files a driver makes for them."""
        devices = {
            kind: sum(len(list(Path("/dev").glob(pattern))) for pattern in patterns)
            for kind, patterns in _DEVICE_FILES.items()
        }
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return Resources(cpus or 1, {kind: number for kind, number in devices.items() if number})

    async def close(self) -> None:
        self._closed = True
        groups = [group for group in self._groups.values() if group]
        try:
            async with asyncio.TaskGroup() as killing:
                for group in groups:
                    killing.create_task(group.kill(0.0))
        finally:
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def _spawn(self, name: str, spec: ProcessSpec) -> _Member:
        log, control = self._logs / f"{name}.log", self._sockets / str(next(self._numbers))
        read_end, lifeline = os.pipe()
        try:
            # The socket listens before the child lives, so a call need not ask whether it does.
            with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
                listener.bind(str(control))
                listener.listen()
                own = {CONTROL_FD: str(listener.fileno()), CONTROL_TOKEN: self._token}
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    stdin=read_end,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env=child_env(self._environ, spec, own),
                    start_new_session=True,
                    pass_fds=(listener.fileno(),),
                )
        except BaseException as error:
            os.close(lifeline)
            if isinstance(error, FileNotFoundError | PermissionError):
                text = f"{name}: cannot start {spec.argv[0]} ({error.strerror})"
                raise OSError(error.errno, text) from error
            raise
        finally:
            os.close(read_end)
        return _Member(process, lifeline, control, log)
