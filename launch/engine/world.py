"""[H] A `jax.distributed` world: what its launcher tells each process, and how a process joins.

Everything is said explicitly; jax's detection of clusters is off, since variables of a batch system
would silently choose devices.
"""

import errno
import os
import socket
from pathlib import Path

COORDINATOR = "RL_JAX_WORLD_COORDINATOR"
NUM_PROCESSES = "RL_JAX_WORLD_NUM_PROCESSES"
PROCESS_ID = "RL_JAX_WORLD_PROCESS_ID"

_SPAN = 4000
"""Ports in use are looked for among this many below the ephemeral ones."""


def world_env(process_id: int, num_processes: int, coordinator: str) -> dict[str, str]:
    """Variables of process `process_id`; process 0 will listen at `coordinator`, host:port."""
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process {process_id} of a world of {num_processes}")
    return {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(num_processes),
        PROCESS_ID: str(process_id),
    }


class Coordinators:
    """Addresses for the coordinators of worlds on `host`, each given out once in a long while.

    Every attempt takes a new one: whatever took the port in the meantime, the next start is free of
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
            if _is_free(self._host, port):
                return f"{self._host}:{port}"
        raise OSError(
            f"no port from {self._ports.start} to {self._ports.stop - 1} on {self._host} is free "
            "for a coordinator"
        )


def join_world(*, timeout_s: float = 60.0, heartbeat_s: float = 30.0) -> None:
    """Joins the world that the environment tells of; a process that is told of none is alone.

    `timeout_s` bounds the wait for the other processes, `heartbeat_s` the time a dead one goes
    unnoticed. Raises OSError where process 0 finds the coordinator's port in use.
    """
    if COORDINATOR not in os.environ:
        return
    coordinator, process_id = os.environ[COORDINATOR], int(os.environ[PROCESS_ID])
    host, _, port = coordinator.rpartition(":")
    if process_id == 0 and not _is_free(host, int(port)):  # jax would end in a segmentation fault
        raise OSError(f"coordinator port {coordinator} is in use; a restart takes another one")

    import jax

    jax.distributed.initialize(
        coordinator,
        num_processes=int(os.environ[NUM_PROCESSES]),
        process_id=process_id,
        coordinator_bind_address=coordinator,
        cluster_detection_method="deactivate",
        initialization_timeout=round(timeout_s),
        heartbeat_timeout_seconds=round(heartbeat_s),
    )


def _ephemeral_floor() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux; the lowest among systems in use
        return 32768


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
