"""[H] Where the hosts of a launch are, and what follows for each process: addresses, its world."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launch.engine.base import ProcessSpec
from launch.engine.world import Place
from launch.env_table import over
from launch.processes import ENTRY
from launch.roles.base import TOKEN, Addresses, Role
from launch.spec import LaunchPlan, Process, RoleGroup
from rl_jax.config.base import UserError

HOSTS, HOSTS_FILE = "RL_JAX_HOSTS", "RL_JAX_HOSTS_FILE"
"""The hosts by index: with commas between, or the file that has one in each line."""
TOKEN_FILE = "RL_JAX_TOKEN_FILE"
ATTEMPT = "RL_JAX_ATTEMPT"
"""How often the job was started before."""


class Site(NamedTuple):
    """Where this process is, and where the others are."""

    hosts: tuple[str, ...]
    token: str
    attempt: int


def read_site(plan: LaunchPlan) -> Site:
    """From the environment. UserError for a missing or open token and for a wrong list of hosts."""
    hosts = _hosts(len(plan.hosts))
    attempt = os.environ.get(ATTEMPT) or "0"
    if not attempt.isdecimal():
        raise UserError(f"{ATTEMPT} = {attempt}: needs a number of earlier starts")
    return Site(hosts, _token(), int(attempt))


def _hosts(count: int) -> tuple[str, ...]:
    told = os.environ.get(HOSTS, "")
    if not told and (file := os.environ.get(HOSTS_FILE)):
        try:
            told = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{HOSTS_FILE} = {file}: cannot be read ({error.strerror})") from None
    found = tuple(told.replace(",", " ").split())
    if not found and count == 1:
        return ("127.0.0.1",)
    if len(found) != count:
        raise UserError(f"{HOSTS} names {len(found)} hosts, the plan has {count}")
    return found


def _token() -> str:
    if token := os.environ.get(TOKEN):
        return token
    file = os.environ.get(TOKEN_FILE)
    if not file:
        raise UserError(
            f"no token: {TOKEN_FILE} names a file of mode 600 that all hosts see, or a secret sets "
            f"{TOKEN}"
        )
    return read_secret(TOKEN_FILE, file)


def read_secret(variable: str, file: str) -> str:
    """UserError where the `file` that `variable` names is lacking, empty or open to others."""
    try:
        mode = stat.S_IMODE(os.stat(file).st_mode)
        token = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{variable} = {file}: cannot be read ({error.strerror})") from None
    if mode & 0o077:
        raise UserError(f"{file} has mode {mode:o}, so others may read the token: chmod 600 it")
    if not token:
        raise UserError(f"{file} is empty, so there is no token")
    return token


def addresses_of(plan: LaunchPlan, hosts: Sequence[str]) -> Addresses:
    """Where every role serves."""

    def at(process: Process, port: str) -> str:
        return f"tcp:{hosts[process.host]}:{process.ports[port][0]}"

    first = plan.group("trainer").processes[0]
    samplers = [group.processes[0] for group in plan.groups if group.kind == "sampler"]
    served = tuple(at(process, "serve") for process in samplers)
    return Addresses(at(first, "link"), at(first, "queue"), served)


def specs_of(
    group: RoleGroup, processes: Sequence[Process], role: Role, site: Site
) -> tuple[ProcessSpec, ...]:
    """How `processes` of a group are started; what this environment sets wins over the plan's."""
    return tuple(
        ProcessSpec(
            ENTRY,
            over(process.env, os.environ) | world_of(group, process, site) | role.to_env(),
            tuple(ports_of(process, site).values()),
        )
        for process in processes
    )


def world_of(group: RoleGroup, process: Process, site: Site) -> dict[str, str]:
    """What a process of a world is told of it; every attempt has other ports."""
    first = group.processes[0]
    if "coordinator" not in first.ports:
        return {}
    at = ports_of(first, site)
    served = [f"{site.hosts[first.host]}:{at[name]}" for name in ("coordinator", "channel")]
    return Place(process.rank, len(group.processes), *served).to_env()


def ports_of(process: Process, site: Site) -> dict[str, int]:
    """What a process listens at in this attempt: others of a world's may be another attempt's."""
    return {name: own[site.attempt % len(own)] for name, own in process.ports.items()}
