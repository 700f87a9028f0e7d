"""What a test and a process wait for, as events with deadlines: a death, a byte in a named pipe."""

import os
import select
from pathlib import Path

DEADLINE_S = 20.0


def alive(pid: int) -> bool:
    """Whether there is such a process, dead and not reaped included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Watched:
    """A process that lives now; its pid cannot come to mean another one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def gone(self, within_s: float = DEADLINE_S) -> bool:
        """Dead, whether or not somebody has reaped it."""
        return bool(select.select([self._fd], [], [], within_s)[0])


class Pipe:
    """A new named pipe at `path`; either side writes a byte for the other."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Both ends are ours, so neither side waits for the other one to open it.
        self._fd = os.open(path, os.O_RDWR)

    def tell(self) -> None:
        os.write(self._fd, b".")

    def told(self, within_s: float = DEADLINE_S) -> bool:
        return bool(select.select([self._fd], [], [], within_s)[0])
