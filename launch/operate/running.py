"""[H] Which process runs a run: `running.json` in its directory, locked for as long as it lives.

A number alone would name a stranger once the process is gone: the lock says that it lives, host and
start time that it is the one that was written down.
"""

import json
import os
import signal
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from launch.report.data import RUNNING, locked
from launch.stop import Stopped
from rl_jax.config.base import UserError
from rl_jax.replay.records import lock

CRASHES = "logs/run-0.log"
"""Of the process itself, beside what its roles print where they are processes."""
_STATE, _BORN = 0, 19
"""Of /proc/PID/stat, counted after the name in parentheses."""


class Runner(NamedTuple):
    """A process, so that it can be told from all others."""

    pid: int
    host: str
    born: int
    """Clock ticks from the host's start to the process's; 0 where the system does not tell."""
    scattered: bool = False
    """Whether the roles that it starts stand on other hosts."""

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this host."""
        return self.host == socket.gethostname()

    def lives(self) -> bool:
        """Whether it is still there; asked on its host."""
        return _born(self.pid) == self.born

    def send(self, number: signal.Signals) -> bool:
        """Whether it was there to get the signal; no other process can get it."""
        if not hasattr(os, "pidfd_open"):
            if self.lives():
                os.kill(self.pid, number)
            return self.lives()
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            try:
                # Looked at while the descriptor holds the process: its number cannot be another's.
                if self.lives():
                    signal.pidfd_send_signal(descriptor, number)
                    return True
            finally:
                os.close(descriptor)
        return False


def of_process(pid: int) -> Runner:
    """A living process of this host."""
    return Runner(pid, socket.gethostname(), _born(pid) or 0)


@contextmanager
def recorded(run_dir: Path, *, scattered: bool = False) -> Iterator[None]:
    """This process is known as who runs `run_dir`, to the end of the block; what it crashes with is
    in CRASHES. UserError where another runs it."""
    path = run_dir / RUNNING
    try:
        descriptor = _held(path)
    except ValueError:
        raise UserError(f"{run_dir} is run by another process: it still goes on") from None
    try:
        own = of_process(os.getpid())._replace(scattered=scattered)
        text = json.dumps(own._asdict()).encode()
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
        yield
    except (UserError, Stopped):
        raise
    except Exception:
        _keep_crash(run_dir)
        raise
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _held(path: Path) -> int:
    """As `lock`, of the file that is there: while it was waited for, who had it before may have
    taken it away, and what is locked then nobody else finds."""
    while True:
        descriptor = lock(path)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _keep_crash(run_dir: Path) -> None:
    """Where the run has begun; a directory in which nothing ran stays as it is."""
    if (run_dir / "journal").is_dir():
        log = run_dir / CRASHES
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc())


def runner(run_dir: Path) -> Runner | None:
    """Who runs it now; None where nobody does whom `recorded` knows."""
    path = run_dir / RUNNING
    # The lock last: who holds it then has written what was read, or nothing yet.
    with suppress(OSError, ValueError, TypeError):
        found = Runner(**json.loads(path.read_text(encoding="utf-8")))
        return found if locked(path) else None
    return None


def _born(pid: int) -> int | None:
    """None for a process that has ended, also where its parent has not asked for its status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self").exists() else _there(pid)
    return None if fields[_STATE] in "ZX" else int(fields[_BORN])


def _there(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
