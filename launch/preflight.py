"""[H] `rl-jax preflight`: what a launch needs of its machines, one line for each check.

Alone it checks this machine. With a plan and a host's index all hosts check together: they meet in
a directory beside the plan, which is how it is known to be shared.
"""

import argparse
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from launch.env_table import over
from launch.ports import first_taken
from launch.role import read_plan
from launch.spec import PLATFORMS, LaunchPlan, RunSpec, make_plan, members
from rl_jax.config.base import UserError
from rl_jax.config.load import load

PACKAGES = ("rl-jax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "msgpack")
MEET = "preflight"
"""Directory beside the plan."""
MEET_S, PROBE_S = 120.0, 300.0
"""Deadlines: until all hosts have written, and of the devices' check with its compilation."""
LOOK_S = 0.05
SKEW_S = 5.0
"""Between two hosts' clocks. Times of different hosts are only shown beside each other; leases and
names of attempts want no more than this."""
SHM_BYTES = 1 << 30
"""Containers often have 64 MiB; NCCL alone takes some hundred on a host of eight GPUs."""


class Facts(NamedTuple):
    """Of one host."""

    host: int
    versions: Mapping[str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, as in configs/")
    parser.add_argument("--plan", type=Path, help="plan.json: all hosts check together ...")
    parser.add_argument("--host", type=int, metavar="N", default=0, help="... this one being N")
    parser.add_argument(
        "--alone", action="store_true", help="with --plan: this host, without the others"
    )
    parser.add_argument(
        "--no-devices", action="store_true", help="leave the devices alone: others use them"
    )


def run(given: argparse.Namespace) -> int:
    """Prints a line for each check that holds; UserError, the line of the first that does not."""
    config = load(given.config)
    if given.plan:
        plan, beside = read_plan(given.plan), given.plan.absolute().parent
    else:
        plan, beside = make_plan(RunSpec(config, f"runs/{config.name}")), Path.cwd()
    if not 0 <= given.host < len(plan.hosts):
        raise UserError(f"--host {given.host}: the plan has {len(plan.hosts)} hosts")
    together = bool(given.plan) and not given.alone and len(plan.hosts) > 1
    checks: list[Callable[[], str]] = [
        lambda: check_ports(_ports(plan, given.host)),
        lambda: check_memory(Path("/dev/shm")),
        lambda: check_store((beside / plan.run_dir).parent, given.host),
        lambda: meet(beside / MEET, given.host, len(plan.hosts)) if together else _alone(),
    ]
    if not given.no_devices:
        checks.append(lambda: check_devices(plan, given.host))
    for check in checks:
        print(check(), flush=True)
    return 0


def _ports(plan: LaunchPlan, host: int) -> list[int]:
    own = [process.ports.values() for _, process in members(plan, host)]
    return sorted(port for served in own for ports in served for port in ports)


def check_ports(ports: Sequence[int]) -> str:
    """All of this host's can be had."""
    if found := first_taken(ports):
        raise UserError(
            f"ports: {found[0]} cannot be had ({found[1]}): choose others with launch.first_port"
        )
    return f"ports: {', '.join(map(str, ports)) or 'none needed'} free"


def check_memory(where: Path, needed: int = SHM_BYTES) -> str:
    """Shared memory between processes of this host."""
    if not where.is_dir():
        return f"shared memory: no {where} on this system"
    free = shutil.disk_usage(where).free
    if free < needed:
        raise UserError(
            f"shared memory: {where} has {free >> 20} MiB free, needs {needed >> 20}: give the "
            "container more (docker --shm-size, an emptyDir of medium Memory)"
        )
    return f"shared memory: {free >> 20} MiB free in {where}"


def check_store(where: Path, host: int) -> str:
    """Snapshots can be written, read and deleted beside the run's directory."""
    while not where.exists():
        where = where.parent
    # Containers of several hosts have the same pids.
    made = where / f".preflight-{host}-{secrets.token_hex(4)}"
    payload = os.urandom(1 << 16)
    try:
        made.mkdir(parents=True)
        try:
            part = made / "part"
            part.write_bytes(payload)
            part.rename(made / "whole")
            found = (made / "whole").read_bytes()
        finally:
            shutil.rmtree(made)
    except OSError as error:
        raise UserError(
            f"store: {where}: {error.strerror}: snapshots cannot be kept there"
        ) from None
    if found != payload:
        raise UserError(f"store: {where}: what was read is not what was written")
    return f"store: {where} can be written, read and cleared"


def facts(host: int) -> Facts:
    """Of this host."""
    found = {name: version(name) for name in PACKAGES}
    return Facts(host, {"python": platform.python_version(), **found})


def _alone() -> str:
    return _versions_line(facts(0).versions)


def _versions_line(versions: Mapping[str, str]) -> str:
    return "versions: " + ", ".join(f"{name} {number}" for name, number in versions.items())


def meet(where: Path, host: int, count: int) -> str:
    """All hosts find each other on the shared disk, with equal versions and clocks.

    Host 0 asks with a number of this meeting's own, all answer with versions and clocks, host 0
    judges, and all are told the verdict. What an earlier meeting left has another number; who
    answered its question answers the new one, too.
    """
    where.mkdir(parents=True, exist_ok=True)
    verdict = _lead(where, count) if host == 0 else _answer(where, host)
    if verdict["fault"]:
        raise UserError(verdict["fault"])
    return verdict["line"]


def _lead(where: Path, count: int) -> dict[str, str]:
    for old in where.glob("verdict-*"):
        old.unlink()
    nonce = secrets.token_hex(8)
    try:
        verdict = {"line": _judge(where, nonce, count), "fault": ""}
    except UserError as error:
        verdict = {"line": "", "fault": str(error)}
    _write(where / f"verdict-{nonce}", verdict)
    return verdict


def _answer(where: Path, host: int) -> dict[str, str]:
    """The verdict on the newest question. One that lay there before is of an earlier meeting."""
    old = {path.name for path in where.glob("verdict-*")}
    asked, answered = where / "ask", ""
    deadline = time.monotonic() + MEET_S
    while time.monotonic() < deadline:
        nonce = _read(asked) if asked.is_file() else ""
        if nonce != answered:
            own = {"versions": facts(host).versions, "clock": time.time()}
            _write(where / f"answer-{nonce}-{host}", own)
            answered = nonce
        verdict = where / f"verdict-{answered}"
        if verdict.name not in old and verdict.is_file():
            return _read(verdict)
        time.sleep(LOOK_S)
    raise UserError(_absent(where / f"verdict-{answered}" if answered else asked, host))


def _judge(where: Path, nonce: str, count: int) -> str:
    asked = time.time()
    _write(where / "ask", nonce)
    known, skews = [facts(0)], {}
    deadline = time.monotonic() + MEET_S
    # All are waited for before anything is judged: a fault is told to hosts that have answered.
    for host in range(1, count):
        answer = where / f"answer-{nonce}-{host}"
        while not answer.is_file():
            if time.monotonic() > deadline:
                raise UserError(_absent(answer, host))
            time.sleep(LOOK_S)
        told = _read(answer)
        known.append(Facts(host, told["versions"]))
        skews[host] = skew(asked, told["clock"], time.time())
    versions = check_versions(known)
    return f"{versions}, equal on {count} hosts that share {where.parent}; {check_clocks(skews)}"


def check_versions(known: Sequence[Facts]) -> str:
    """The same on all hosts as on the first."""
    first = known[0]
    for other in known[1:]:
        for name, number in first.versions.items():
            if (found := other.versions.get(name)) != number:
                raise UserError(
                    f"versions: host {other.host} has {name} {found}, host {first.host} {number}: "
                    "install the same image or lock file on both"
                )
    return _versions_line(first.versions)


def skew(asked: float, told: float, heard: float) -> float:
    """Seconds that a clock is off at least, which showed `told` between `asked` and `heard`."""
    return max(asked - told, told - heard, 0.0)


def check_clocks(skews: Mapping[int, float]) -> str:
    """None is off by more than SKEW_S; how slow the disk tells of it does not count."""
    worst = max(skews, key=lambda host: skews[host])
    if skews[worst] > SKEW_S:
        raise UserError(
            f"clocks: host {worst} is off host 0 by {skews[worst]:.0f} s: at most {SKEW_S:g} s; "
            "is its time service running?"
        )
    return f"clocks off by at most {max(skews.values()):.1f} s"


def _write(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(path)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _absent(path: Path, host: int) -> str:
    return (
        f"shared disk: {path.name} is not in {path.parent} after {MEET_S:g} s: does host {host} "
        "see the same disk, and has it begun?"
    )


def check_devices(plan: LaunchPlan, host: int) -> str:
    """As many as the plan says, and one sum over them is right."""
    kind, wanted = PLATFORMS[plan.chip], plan.hosts[host].devices
    own = next((p.env for g, p in members(plan, host) if g.kind != "host"), {})
    env = os.environ | over(own, os.environ)
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if kind == "cpu":
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={wanted}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "launch.probe"],
            env=env, capture_output=True, text=True, timeout=PROBE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"devices: no answer within {PROBE_S:g} s: another process may hold them"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"devices: the check ended with {done.returncode}: {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    return judge_devices(kind, wanted, found)


def judge_devices(kind: str, wanted: int, found: Mapping[str, float]) -> str:
    """What the probe found against the plan."""
    if found["devices"] != wanted:
        raise UserError(f"devices: {found['devices']} {kind}, launch says {wanted} a host")
    if found["sum"] != wanted:
        raise UserError(f"psum: ones over {wanted} {kind} devices sum to {found['sum']:g}")
    return f"devices: {wanted} {kind}, a sum over them is right"
