"""[N] What an engine is: it starts groups of processes, watches them, calls them, ends them.

A group is the processes of one `jax.distributed` world and the unit of restart: a world with a dead
member is useless, so the engine ends the rest of it. No process outlives its engine: `close`
kills, and a process notices by itself that its engine is gone (`launch.engine.child`).
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

USER_ERROR = 2
"""Exit status of a process that met a mistake of the user's; its last line of output tells it."""
CONTROL_FD = "RL_JAX_CONTROL_FD"
"""Variable with the number of the inherited, listening Unix socket that a process serves."""
CONTROL_TOKEN = "RL_JAX_CONTROL_TOKEN"
"""Variable with the token that every call must carry."""
_CLUSTER = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MEGASCALE_")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class GroupDied(RuntimeError):
    """A call to a group of which a process has died; says which one first, and how."""


class CallFailed(RuntimeError):
    """The called function raised, or its answer cannot be read; says what it raised."""


class ProcessSpec(NamedTuple):
    """One process; `env` is added to the engine's own environment, less what `child_env` strips.

    The program calls `launch.engine.child.die_with_parent` before anything else, as an engine that
    is killed ends nothing; `serve_control` answers the calls.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ports: tuple[int, ...] = ()
    """What it will listen at; an engine of several machines starts nothing where one is taken."""


@dataclass(frozen=True)
class GroupSpec:
    """`grace_s` is what the others get, seconds, from TERM to KILL, when a member has ended."""

    name: str
    processes: tuple[ProcessSpec, ...]
    grace_s: float
    first: int = 0
    """What the log of the first process is numbered, where those before it are elsewhere."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"group name {self.name!r}: letters, digits, _ . - (it names log files)"
            )
        if not self.processes or not all(process.argv for process in self.processes):
            raise ValueError(f"group {self.name}: needs at least one process, each with a program")


class Started(NamedTuple):
    pid: int


class Exited(NamedTuple):
    """`code` is the exit status, or minus the signal that ended the process."""

    index: int
    pid: int
    code: int


ProcessEvent = Started | Exited


class Resources(NamedTuple):
    """What processes can be placed on; `devices` by kind ("gpu", "tpu"), as far as known."""

    cpus: int
    devices: Mapping[str, int]


@runtime_checkable
class Group(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def pids(self) -> Sequence[int]:
        """By index, of ended processes too."""
        ...

    def log(self, index: int) -> Path:
        """The file with what process `index` printed, earlier attempts first."""
        ...

    async def call(self, function: str, arguments: Mapping[str, Any], *, deadline: float) -> Any:
        """What `function` of process 0 returns; waits for it to serve, `deadline` seconds in all.

        Raises TimeoutError, GroupDied, CallFailed, and ValueError for arguments that msgpack does
        not know or that are too many bytes.
        """
        ...

    def events(self) -> AsyncIterator[ProcessEvent]:
        """All events from the start on, in order; ends when every process has exited.

        Raises TimeoutError where a member has died and KILL does not end another.
        """
        ...

    async def kill(self, grace_s: float) -> None:
        """TERM to every process and its children, KILL after `grace_s`; returns when all are gone.

        May be called again with less grace. Raises TimeoutError where KILL does not end one.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    async def start_group(self, spec: GroupSpec) -> Group:
        """All processes or none. Raises ValueError where a group of that name is alive, OSError
        where a program cannot be started."""
        ...

    def resources(self) -> Resources: ...

    async def close(self) -> None:
        """Kills everything it started, at once."""
        ...


def child_env(
    environ: Mapping[str, str], spec: ProcessSpec, control: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a process: `environ` without what would make jax believe it was started
    by a cluster's launcher, unbuffered output, what `spec` says, and its `control` socket."""
    inherited = {k: v for k, v in environ.items() if not k.startswith(_CLUSTER)}
    return {**inherited, "PYTHONUNBUFFERED": "1", **spec.env, **control}


def cause(exits: Sequence[Exited]) -> Exited:
    """The exit that tells how a group ended: the first that failed, or else the first."""
    return next((e for e in exits if e.code != 0), exits[0])
