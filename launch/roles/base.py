"""[N] A role as a process: which one, of which run, and where the others are."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROLE = "RL_JAX_ROLE"
"""Variable with what `Role.to_env` makes."""
TOKEN = "RL_JAX_TOKEN"
"""Variable with the token that peers of one run share."""


class Addresses(NamedTuple):
    """Where roles serve."""

    link: str
    queue: str
    samplers: tuple[str, ...]


class Role(NamedTuple):
    """What a process is told of itself."""

    name: str
    """"trainer", "orchestrator", or "sampler-0", ..."""
    run_dir: Path
    began: float
    """When the run began, as `time.time()` has it."""
    addresses: Addresses
    token: str
    placed: bool = False
    """Whether the devices that this process sees are its own; else those of the whole run."""

    def to_env(self) -> dict[str, str]:
        """The variables that `from_env` reads."""
        plain = [self.name, str(self.run_dir), self.began, self.addresses, self.placed]
        return {ROLE: json.dumps(plain), TOKEN: self.token}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Role":
        name, run_dir, began, (link, queue, samplers), placed = json.loads(environ[ROLE])
        addresses = Addresses(link, queue, tuple(samplers))
        return cls(name, Path(run_dir), began, addresses, environ[TOKEN], placed)


def addresses(config_address: str, samplers: int, sockets: Path) -> Addresses:
    """Sockets in the directory `sockets`, or ports from a first one on."""
    if config_address == "unix":
        link, queue, *rest = ("link", "queue", *(f"s{i}" for i in range(samplers)))
        own = tuple(f"unix:{sockets / name}" for name in rest)
        return Addresses(f"unix:{sockets / link}", f"unix:{sockets / queue}", own)
    host, _, port = config_address.removeprefix("tcp:").rpartition(":")
    ports = [f"tcp:{host}:{int(port) + i}" for i in range(2 + samplers)]
    return Addresses(ports[0], ports[1], tuple(ports[2:]))
