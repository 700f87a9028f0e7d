"""[H] A run whose programs are processes: one supervisor, a trainer, an orchestrator, samplers."""

import asyncio
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from launch.engine.base import GroupSpec, ProcessSpec
from launch.engine.local import LocalEngine
from launch.engine.world import Ports
from launch.failure import first_cause
from launch.roles.base import Role, addresses
from launch.spec import WINDOW_S
from launch.stop import Stopped
from launch.supervisor import GRACE_S, Restart, Supervisor
from launch.supervisor import Role as Kept
from launch.tails import tell_new
from launch.terminal import Reporter
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.replay import events
from rl_jax.replay.log import Clock, ProgramLog, open_log

ENTRY = sys.executable, "-m", "launch.roles.entry"
BACKOFF_S = 0.5
WORLD_GRACE_S = 2.0
"""From TERM to KILL for the rest of a world of which one has died: there is nothing to save."""
FOLLOW_S = 0.3
"""How often the log of a role is read for the terminal."""


def run_processes(config: RunConfig, run_dir: Path, reporter: Reporter, *, began: float) -> None:
    """Runs `config`, or goes on with it where `run_dir` holds its record, to its end.

    Raises Stopped where a signal ended it, UserError for a mistake that a role found, and
    RoleFailed where one is beyond its restarts.
    """
    try:
        return asyncio.run(_supervise(config, run_dir, reporter, began))
    except BaseExceptionGroup as group:
        failed = first_cause(group)
    raise failed


def check_ports(config: RunConfig) -> None:
    """UserError where a port that the roles would serve at is taken."""
    own = config.processes
    if own.address == "unix":
        return
    where = addresses(own.address, own.samplers, Path())
    for address in (where.link, where.queue, *where.samplers):
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        try:
            socket.create_server((host or "127.0.0.1", int(port))).close()
        except (OSError, OverflowError) as error:
            raise UserError(
                f'processes.address = "{own.address}": port {port} cannot be had '
                f"({getattr(error, 'strerror', None) or error}); the roles need "
                f"{2 + own.samplers} free ports from the first one on"
            ) from None


async def _supervise(config: RunConfig, run_dir: Path, reporter: Reporter, began: float) -> None:
    # A socket's path has at most 107 bytes, so not in the run's directory.
    sockets = Path(tempfile.mkdtemp(prefix="rl-jax-", dir="/tmp"))
    log = open_log(run_dir, "supervisor", Clock())
    engine = LocalEngine(run_dir)
    roles = _roles(config, run_dir, sockets, began)
    try:
        async with relayed(run_dir / "logs", reporter):
            supervisor = Supervisor(
                engine,
                roles,
                on_started=partial(note_start, log),
                on_ended=partial(note_end, log, reporter),
            )
            completed = await supervisor.run()
    finally:
        await engine.close()
        await log.close()
        shutil.rmtree(sockets, ignore_errors=True)
    if not completed:
        raise Stopped(run_dir, supervisor.signal)


def _roles(config: RunConfig, run_dir: Path, sockets: Path, began: float) -> list[Kept]:
    """In the order in which they are told to end: the trainer first, so its queue is whole."""
    own = config.processes
    where = addresses(own.address, own.samplers, sockets)
    token = secrets.token_hex(16)
    restart = Restart(own.restarts, WINDOW_S, BACKOFF_S)

    def kept(name: str, *, ends_run: bool, size: int = 1) -> Kept:
        env = Role(name, run_dir.absolute(), began, where, token).to_env()

        def spec(attempt: int) -> GroupSpec:
            worlds = [place.to_env() for place in ports.places(size)] if size > 1 else [{}]
            processes = tuple(ProcessSpec(ENTRY, env | world) for world in worlds)
            return GroupSpec(name, processes, GRACE_S if size == 1 else WORLD_GRACE_S)

        return Kept(name, spec, restart, essential=True, ends_run=ends_run)

    ports = Ports()
    samplers = [kept(f"sampler-{i}", ends_run=False) for i in range(own.samplers)]
    trainer = kept("trainer", ends_run=True, size=own.trainers)
    return [trainer, kept("orchestrator", ends_run=True), *samplers]


def note_start(log: ProgramLog, role: str, pid: int) -> None:
    log.append(events.ProcessStarted(role, pid))


def note_end(log: ProgramLog, reporter: Reporter, role: str, pid: int, code: int) -> None:
    log.append(events.ProcessEnded(role, pid, code))
    if code:
        reporter.note(f"{role} (pid {pid}) ended with {code}")


@asynccontextmanager
async def relayed(logs: Path, reporter: Reporter) -> AsyncIterator[None]:
    """What the roles print from now on is shown."""
    read = {path: path.stat().st_size for path in logs.glob("*.log")}
    follower = asyncio.create_task(_follow(logs, read, reporter.note))
    try:
        yield
    finally:
        follower.cancel()
        with suppress(asyncio.CancelledError):
            await follower
        tell_new(logs, read, reporter.note)


async def _follow(logs: Path, read: dict[Path, int], tell: Callable[[str], None]) -> None:
    while True:
        tell_new(logs, read, tell)
        await asyncio.sleep(FOLLOW_S)
