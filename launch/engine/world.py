"""[H] A `jax.distributed` world: what its launcher tells each of its processes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rl_jax.trainer.channel import is_free

WORLD = "RL_JAX_WORLD"
"""Variable with what `Place.to_env` makes."""

_SPAN = 4000
"""Ports in use are looked for among this many below the ephemeral ones."""


class Place(NamedTuple):
    """Which process of a world this is, and where its process 0 listens: two times host:port."""

    process_id: int
    size: int
    coordinator: str
    """Of jax's own service."""
    channel: str
    """Of what process 0 tells the others."""

    def to_env(self) -> dict[str, str]:
        """The variable that `from_env` reads."""
        if not 0 <= self.process_id < self.size:
            raise ValueError(f"process {self.process_id} of a world of {self.size}")
        return {WORLD: json.dumps(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Place | None":
        """None for a process that is told of no world: it is alone."""
        return cls(*json.loads(environ[WORLD])) if WORLD in environ else None


class Ports:
    """Addresses for worlds whose process 0 is on `host`, each given out once in a long while.

    Every attempt takes new ones: whatever took a port in the meantime, the next start is free of
    it. The ports lie below those the kernel gives to outgoing connections.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        floor = _ephemeral_floor()
        self._ports = range(max(1024, floor - _SPAN), floor)
        # Launchers on one machine begin far from each other.
        self._next = os.getpid() * 97

    def take(self) -> str:
        """host:port of a port that is free now. Raises OSError where none is."""
        for _ in self._ports:
            port = self._ports[self._next % len(self._ports)]
            self._next += 1
            if is_free(self._host, port):
                return f"{self._host}:{port}"
        raise OSError(
            f"no port from {self._ports.start} to {self._ports.stop - 1} on {self._host} is free "
            "for a world"
        )

    def places(self, size: int) -> list[Place]:
        """Those of a new world of `size` processes."""
        coordinator, channel = self.take(), self.take()
        return [Place(i, size, coordinator, channel) for i in range(size)]


def _ephemeral_floor() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux; the lowest among systems in use
        return 32768
