"""Two hosts on one machine: network namespaces with a cable between them that can be cut."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ADDRESSES = ("198.51.100.1", "198.51.100.2")
"""Of a block that is for documentation, so nobody's."""
CABLE = "cable"
ESTABLISHED = "01"
"""State of a connection, as Linux writes it."""


class Hosts(NamedTuple):
    """Names of the namespaces."""

    names: tuple[str, str]

    def start(
        self, host: int, argv: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path
    ) -> subprocess.Popen[bytes]:
        """The program on that host; its pid is the program's own."""
        command = ["ip", "netns", "exec", self.names[host], *argv]
        with log.open("ab") as file:
            return subprocess.Popen(
                command, env=env, cwd=cwd, stdout=file, stderr=subprocess.STDOUT
            )

    def cut(self) -> None:
        """Whatever is sent is lost, and nobody is told."""
        ip("-n", self.names[0], "link", "set", CABLE, "down")

    def connections(self, host: int) -> int:
        """Those of this host with the other one that its kernel holds to be alive."""
        command = ["ip", "netns", "exec", self.names[host], "cat", "/proc/net/tcp"]
        table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        other = socket.inet_aton(ADDRESSES[1 - host])[::-1].hex().upper()
        rows = [line.split() for line in table.splitlines()[1:]]
        return sum(row[2].startswith(other) and row[3] == ESTABLISHED for row in rows)

    def mend(self) -> None:
        ip("-n", self.names[0], "link", "set", CABLE, "up")


def missing() -> str:
    """Why there cannot be two hosts here; empty where there can."""
    if os.geteuid():
        return "needs root, who alone may make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command `ip`"
    try:
        with two_hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """At ADDRESSES, as long as it is open."""
    names = (f"rl-jax-{os.getpid()}-0", f"rl-jax-{os.getpid()}-1")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", CABLE, "type", "veth", "peer", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip("-n", name, "link", "set", device, "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
