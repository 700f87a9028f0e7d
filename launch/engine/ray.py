"""[H] The engine of a Ray cluster: for each process an actor on its node, which starts it.

Ray places the actors, finds them and tells of their death; what it moves is control messages, as
bytes. The driver must be connected. Groups stand where `berths` says, others anywhere.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from launch.engine.base import (
    CallFailed,
    Exited,
    GroupDied,
    GroupSpec,
    ProcessEvent,
    ProcessSpec,
    Resources,
)
from launch.engine.history import History, claim
from launch.engine.keeper import LEASE_S, Keeper
from launch.engine.local import REAP_S
from launch.engine.wire import frame, unframed
from rl_jax.config.base import UserError

# Ray is an extra, so the type checker does not know it.
ray: Any = import_module("ray")
RayError: Any = import_module("ray.exceptions").RayError
ActorUnavailableError: Any = import_module("ray.exceptions").ActorUnavailableError

START_S = 120.0
"""From the request for an actor to its process; a node's first worker imports for seconds."""
POLL_S = 5.0
"""How long a keeper holds an answer back while its process lives."""
SILENT_S = LEASE_S + REAP_S
"""After so long without an answer a process is taken for lost: its keeper has ended it by then."""
LOOK_S = 1.0
"""How often it is looked whether a node that has not answered is still there."""
LOST = -signal.SIGKILL
"""The exit code of a process whose end nobody has seen."""


class Displaced(RuntimeError):
    """Ray cannot start a process where its place was: the node is gone, or its workers die."""


class Berth(NamedTuple):
    """Where a process stands: what places its actor, and the node that this is."""

    options: Mapping[str, Any]
    node: str | None
    host: str


ANYWHERE = Berth({"num_cpus": 0}, None, "")


class _Member(NamedTuple):
    keeper: Any
    pid: int
    log: Path
    host: str


class RayGroup:
    """`Group` whose processes are kept by actors; made by `RayEngine`."""

    def __init__(self, spec: GroupSpec, members: Sequence[_Member]) -> None:
        self._spec, self._members = spec, members
        self._history = History(spec.name, self.pids, spec.grace_s, self.kill)
        self._watches = [asyncio.create_task(self._watch(i)) for i in range(len(members))]

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    @property
    def alive(self) -> bool:
        return not self._history.over

    def log(self, index: int) -> Path:
        return self._members[index].log

    def events(self) -> AsyncIterator[ProcessEvent]:
        return self._history.events()

    async def call(self, function: str, arguments: Mapping[str, Any], *, deadline: float) -> Any:
        request = {"function": function, "arguments": dict(arguments), "deadline": deadline}
        try:
            async with asyncio.timeout(deadline):
                return await self._call(frame(request))
        except TimeoutError:
            raise TimeoutError(
                f"{self.name}: no answer to {function}() within {deadline:g} s"
            ) from None

    async def kill(self, grace_s: float) -> None:
        living = [i for i in range(len(self._members)) if i not in self._history.exits]
        await asyncio.gather(*(self._kill(i, grace_s) for i in living))
        if not await self._history.ends_within(SILENT_S):
            raise TimeoutError(f"{self.name}: not known to have ended {SILENT_S:g} s after KILL")

    async def dismissed(self) -> None:
        """Until no actor is left of a group that has ended."""
        await asyncio.gather(*self._watches)

    async def _call(self, request: bytes) -> Any:
        if self._history.exits:
            raise GroupDied(self._history.obituary())
        try:
            reply = unframed(await self._members[0].keeper.call.remote(request))
        except RayError:
            reply = {"died": True}
        match reply:
            case {"result": result}:
                return result
            case {"failed": str(why)}:
                raise CallFailed(why)
            case {"refused": str(why)}:
                raise ValueError(why)
            case {"late": _}:
                raise TimeoutError
        await self._history.first_exit()
        raise GroupDied(self._history.obituary())

    async def _kill(self, index: int, grace_s: float) -> None:
        reply: dict[str, Any] = {}
        # Who does not answer is lost; the watch tells.
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(grace_s + SILENT_S):
                reply = unframed(await self._members[index].keeper.kill.remote(grace_s))
        if why := reply.get("stuck"):
            raise TimeoutError(why)

    async def _watch(self, index: int) -> None:
        member = self._members[index]
        code = await self._code(index)
        self._history.tell(Exited(index, member.pid, code))
        await _dismiss(member.keeper)

    async def _code(self, index: int) -> int:
        member, loop = self._members[index], asyncio.get_running_loop()
        heard = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(heard + SILENT_S):
                    reply = unframed(await member.keeper.wait.remote(POLL_S))
                if "code" in reply:
                    return reply["code"]
                heard = loop.time()
            except (RayError, TimeoutError) as error:
                if not isinstance(error, ActorUnavailableError) or loop.time() > heard + SILENT_S:
                    _note(member, error)
                    return LOST
                await asyncio.sleep(LOOK_S)


class RayEngine:
    """`Engine` on the cluster that this process is connected to.

    `run_dir` is on a disk that every node sees: there are the logs, as `LocalEngine` has them.
    Processes inherit their node's environment and what this one's has in addition. `start_group`
    also raises Displaced, and UserError for a node without token authentication, without
    `run_dir`, which holds a run, or where a port of the process is taken.
    """

    def __init__(self, run_dir: Path, berths: Mapping[str, Sequence[Berth]] | None = None) -> None:
        self._run_dir, self._berths = run_dir.absolute(), berths or {}
        self._groups: dict[str, RayGroup | None] = {}
        self._closed = False

    async def start_group(self, spec: GroupSpec) -> RayGroup:
        claim(spec.name, self._groups, closed=self._closed)
        try:
            group = self._groups[spec.name] = await self._start(spec)
        except BaseException:
            del self._groups[spec.name]
            raise
        return group

    def resources(self) -> Resources:
        """Of all nodes together, free or not."""
        found = ray.cluster_resources()
        devices = {kind: int(found.get(kind.upper(), 0)) for kind in ("gpu", "tpu")}
        return Resources(int(found.get("CPU", 0)), {kind: n for kind, n in devices.items() if n})

    async def close(self) -> None:
        self._closed = True
        async with asyncio.TaskGroup() as killing:
            for group in self._groups.values():
                if group:
                    killing.create_task(_end(group))

    async def _start(self, spec: GroupSpec) -> RayGroup:
        berths = self._berths.get(spec.name) or [ANYWHERE] * len(spec.processes)
        environ = frame(dict(os.environ))
        keepers = [
            ray.remote(Keeper)
            .options(max_restarts=0, **berth.options)
            .remote(str(self._run_dir), os.getcwd(), environ)
            for berth in berths
        ]
        starting = [
            asyncio.create_task(self._place(spec, index, process, keeper, berth))
            for index, (process, keeper, berth) in enumerate(
                zip(spec.processes, keepers, berths, strict=True)
            )
        ]
        try:
            members = await asyncio.gather(*starting)
            if self._closed:
                raise RuntimeError(f"{spec.name}: the engine was closed meanwhile")
        except BaseException:
            for task, keeper in zip(starting, keepers, strict=True):
                task.cancel()
                ray.kill(keeper)
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        return RayGroup(spec, members)

    async def _place(
        self, spec: GroupSpec, index: int, process: ProcessSpec, keeper: Any, berth: Berth
    ) -> _Member:
        """Starts a process of `spec`."""
        name = f"{spec.name}-{index}"
        request = {
            "name": spec.name,
            "index": index,
            "argv": process.argv,
            "env": dict(process.env),
            "ports": process.ports,
            "grace_s": spec.grace_s,
        }
        started = asyncio.ensure_future(_answer(keeper.start.remote(frame(request))))
        try:
            reply = await _while_there(name, started, berth)
        except RayError as error:
            raise Displaced(f"{name}: cannot be started: {_reason(error)}") from error
        finally:
            started.cancel()
        if "open" in reply:
            raise UserError(f"{name}: on its node {berth.host} RAY_AUTH_MODE is not token")
        if "unseen" in reply:
            why = "put it on one that all nodes see"
            raise UserError(f"{self._run_dir} is not on a disk that node {berth.host} sees: {why}")
        if port := reply.get("taken"):
            raise UserError(
                f"{name}: port {port} of its node {berth.host} is in use, as by another run: "
                "choose others with launch.first_port"
            )
        if "error" in reply:
            raise OSError(reply["errno"], reply["error"])
        return _Member(keeper, reply["pid"], self._run_dir / "logs" / f"{name}.log", berth.host)


async def _answer(reference: Any) -> dict[str, Any]:
    return unframed(await reference)


async def _while_there(
    name: str, started: "asyncio.Future[dict[str, Any]]", berth: Berth
) -> dict[str, Any]:
    """The answer of a keeper that starts. Displaced where its node is gone, or it takes too long;
    Ray may have started it on another node then, where nobody looks for it."""
    deadline = asyncio.get_running_loop().time() + START_S
    while True:
        await asyncio.wait({started}, timeout=LOOK_S)
        if berth.node and berth.node not in await asyncio.to_thread(living_nodes):
            raise Displaced(f"{name}: its node {berth.host} is lost")
        if started.done():
            return started.result()
        if asyncio.get_running_loop().time() > deadline:
            raise Displaced(f"{name}: no actor of Ray's within {START_S:g} s")


def living_nodes() -> dict[str, dict[str, Any]]:
    """Ray's nodes that are alive, by their id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


async def _end(group: RayGroup) -> None:
    await group.kill(0.0)
    await group.dismissed()


async def _dismiss(keeper: Any) -> None:
    """Ends an actor, in good order where it can be."""
    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(REAP_S):
            await keeper.close.remote()
    ray.kill(keeper)


def _note(member: _Member, error: BaseException) -> None:
    """Where everybody looks for what a process said last."""
    why = _reason(error) or "no answer"
    text = f"\nrl-jax: pid {member.pid} is lost, with its node {member.host or '?'}: {why}\n"
    with suppress(OSError), member.log.open("a") as log:
        log.write(text)


def _reason(error: BaseException) -> str:
    """Of Ray's several lines the last one."""
    return str(error).strip().rpartition("\n")[2].strip()
