"""[H] How a process ended, in words."""

import signal

from launch.engine.base import Exited


def in_words(exited: Exited) -> str:
    """As in: process 0 (pid 71) was killed by SIGKILL; process 1 (pid 72) exited with 3."""
    who = f"process {exited.index} (pid {exited.pid})"
    if exited.code >= 0:
        return f"{who} exited with {exited.code}"
    try:
        name = signal.Signals(-exited.code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exited.code}"
    return f"{who} was killed by {name}"
