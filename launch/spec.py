"""[N] From a configuration to its launch: which process stands where, and what it is told.

One plan for every target. A trainer's world, each sampler and the orchestrator are groups of their
own, since a world dies as a whole: what need not share its fate is outside of it. A group of one
process is started again where it stands; a world of several is started again with the job.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from launch.env_table import Kind, Platform, resolve, variables
from rl_jax.config.base import Section, UserError
from rl_jax.config.launch import Hosts, Launch
from rl_jax.config.run import RunConfig

PORTS = 600
"""A run's ports are that many from `launch.first_port` on."""
ATTEMPTS = 16
"""Ports of a coordinator, and of a channel; attempt n of a world takes the n-th, in a circle."""
FIRST_SAMPLER = 100
"""Where the samplers' ports begin, above the run's first."""
GRACE_S: dict[Kind, float] = {"trainer": 240.0, "sampler": 30.0, "host": 60.0}
"""From TERM to KILL. A trainer writes a checkpoint; Slurm's notice is 300 s."""
PLATFORMS: dict[str, Platform] = {"cpu": "cpu", "h200": "gpu", "v5p": "tpu", "v6e": "tpu"}
WINDOW_S = 600.0
Pool = Literal["trainer", "sampler"]
"""Whose a host is; without hosts of their own, samplers stand on the trainer's."""


class RunSpec(NamedTuple):
    """What a plan is made of."""

    config: RunConfig
    run_dir: str
    """The run's directory as every host sees it."""


class Process(Section):
    """One operating-system process."""

    rank: int
    """Within its group."""
    host: int
    devices: tuple[int, ...]
    """Of its host; none for a role without."""
    ports: dict[str, tuple[int, ...]]
    """What it listens at."""
    env: dict[str, str]


class Deadlines(Section):
    """Seconds."""

    start_s: float
    """Until all others are there."""
    stop_s: float
    """From TERM to KILL."""


class RoleGroup(Section):
    """Processes that live and die together."""

    name: str
    kind: Literal["trainer", "sampler", "host"]
    platform: Literal["cpu", "gpu", "tpu"]
    processes: tuple[Process, ...]
    deadlines: Deadlines
    restarts: int
    """Within `window_s`, before its loss is the run's."""
    window_s: float
    restarted_with: Literal["host", "job"]
    """Who starts it again: its host alone, or all hosts together."""


class Host(Section):
    """One machine; its supervisor starts its processes and ends them."""

    index: int
    pool: Pool
    devices: int


class LaunchPlan(Section):
    """Everything that a target needs to know."""

    name: str
    run_dir: str
    chip: Literal["cpu", "h200", "v5p", "v6e"]
    trainer_topology: str | None
    sampler_topology: str | None
    hosts: tuple[Host, ...]
    groups: tuple[RoleGroup, ...]

    def group(self, name: str) -> RoleGroup:
        """UserError where there is none of that name."""
        for group in self.groups:
            if group.name == name:
                return group
        known = ", ".join(group.name for group in self.groups)
        raise UserError(f"no role {name} in the plan of {self.name}; there is {known}")


def make_plan(spec: RunSpec) -> LaunchPlan:
    """UserError, in one line, where the meshes do not fit the machines that `launch` tells of."""
    config, launch = spec.config, spec.config.launch
    platform = PLATFORMS[launch.chip]
    pools = _pools(launch)
    worlds = _trainer_devices(config, launch.trainer, platform)
    replicas = _sampler_devices(config, pools, worlds, platform)
    groups = (
        _group(spec, "trainer", "trainer", worlds),
        _group(spec, "orchestrator", "host", [(0, ())]),
        *(_group(spec, f"sampler-{i}", "sampler", [at]) for i, at in enumerate(replicas)),
    )
    _check_used(config, pools, {process.host for group in groups for process in group.processes})
    return LaunchPlan(
        name=config.name,
        run_dir=spec.run_dir,
        chip=launch.chip,
        trainer_topology=launch.trainer.topology,
        sampler_topology=launch.sampler.topology if launch.sampler else None,
        hosts=pools,
        groups=groups,
    )


def one_process_plan(spec: RunSpec) -> LaunchPlan:
    """For a run in one process over whole slices, each as `launch.trainer` tells, as many as its
    meshes need. UserError where the topology does not fit."""
    config, hosts = spec.config, spec.config.launch.trainer
    _check_topology("trainer", hosts, chips := hosts.count * hosts.devices)
    count = -(-config.devices_needed // chips) * hosts.count
    return LaunchPlan(
        name=config.name,
        run_dir=spec.run_dir,
        chip=config.launch.chip,
        trainer_topology=hosts.topology,
        sampler_topology=None,
        hosts=tuple(Host(index=i, pool="trainer", devices=hosts.devices) for i in range(count)),
        groups=(_group(spec, "trainer", "trainer", [(0, ())]),),
    )


Stand = tuple[int, tuple[int, ...]]
"""A host and devices of it."""


def _pools(launch: Launch) -> tuple[Host, ...]:
    """The trainer's hosts, then the samplers' own."""
    kinds: list[tuple[Pool, Hosts]] = [("trainer", launch.trainer)]
    if launch.sampler:
        kinds.append(("sampler", launch.sampler))
    found: list[Host] = []
    for pool, hosts in kinds:
        for index in range(len(found), len(found) + hosts.count):
            found.append(Host(index=index, pool=pool, devices=hosts.devices))
    return tuple(found)


def _trainer_devices(config: RunConfig, hosts: Hosts, platform: Platform) -> list[Stand]:
    """Places of the world's processes, in rank order, which is the order of hosts: one after the
    other, which takes the fewest hosts and leaves samplers most room, or, where that would cut one
    in two, as many on each host."""
    size, count = config.mesh.trainer.size, config.processes.trainers
    available = hosts.count * hosts.devices
    if size > available or (platform == "tpu" and size != available):
        raise UserError(
            f"mesh.trainer = {config.mesh.trainer}: {size} devices do not fit launch.trainer = "
            f"{hosts.count} hosts of {hosts.devices}: "
            + (f"a slice is used whole, so it needs {available}" if platform == "tpu"
               else f"at most {available}")
        )  # fmt: skip
    _check_topology("trainer", hosts, available)
    each = size // count
    share, rest = divmod(count, hosts.count)
    at = [rank * each for rank in range(count)]
    if _cut(at, each, hosts.devices) and not rest:
        at = [rank // share * hosts.devices + rank % share * each for rank in range(count)]
    if _cut(at, each, hosts.devices):
        raise UserError(
            f"processes.trainers = {count}: {size} devices of mesh.trainer are {each} of each, "
            f"which would span hosts of {hosts.devices}"
        )
    if platform == "tpu" and each != hosts.devices:
        raise UserError(
            f"processes.trainers = {count}: a TPU host belongs to one process: needs {hosts.count}"
        )
    return [_place(first, each, hosts.devices) for first in at]


def _cut(at: list[int], each: int, per_host: int) -> bool:
    """Whether one of those that begin `at` would span hosts."""
    return any(first // per_host != (first + each - 1) // per_host for first in at)


def _sampler_devices(
    config: RunConfig, pools: tuple[Host, ...], worlds: list[Stand], platform: Platform
) -> list[Stand]:
    """Places of the samplers: on hosts of their own, or beside the trainer on its hosts."""
    size, count = config.mesh.sampler.size, config.processes.samplers
    own = [host for host in pools if host.pool == "sampler"]
    hosts = own or list(pools)
    used = set() if own else {(host, device) for host, devices in worlds for device in devices}
    each = hosts[0].devices
    if platform == "tpu" and not own:
        raise UserError(
            "launch.sampler: left out, but a TPU host belongs to one process: say how many hosts "
            "the samplers have"
        )
    if platform == "tpu" and size != each:
        raise UserError(
            f"mesh.sampler = {config.mesh.sampler}: a sampler is one process and a TPU host "
            f"belongs to it: needs launch.sampler.devices = {each} devices, not {size}"
        )
    if own and config.launch.sampler:
        _check_topology("sampler", config.launch.sampler, each)
    # A sampler does not span hosts; what is left over of one stays idle.
    slots = [
        (host, at)
        for host in range(len(hosts))
        for at in range(0, each - size + 1, size)
        if used.isdisjoint((host, device) for device in range(at, at + size))
    ]
    if len(slots) < count:
        where = f"launch.{'sampler' if own else 'trainer'} = {len(hosts)} hosts of {each}"
        raise UserError(
            f"processes.samplers = {count} of {size} devices: {where} "
            f"{'have' if own else 'leave'} room for {len(slots)}"
        )
    places = [(hosts[host].index, tuple(range(at, at + size))) for host, at in slots]
    return places[:count]


def _place(first: int, count: int, per_host: int) -> Stand:
    host, at = divmod(first, per_host)
    return host, tuple(range(at, at + count))


def _check_topology(key: str, hosts: Hosts, chips: int) -> None:
    if hosts.topology and (held := prod(map(int, hosts.topology.split("x")))) != chips:
        raise UserError(
            f'launch.{key}.topology = "{hosts.topology}": has {held} chips, its hosts have {chips}'
        )


def _check_used(config: RunConfig, pools: tuple[Host, ...], used: set[int]) -> None:
    """A host that nothing stands on would have nothing to do, and end the job of all of them."""
    told = {
        "trainer": f"processes.trainers = {config.processes.trainers}",
        "sampler": f"processes.samplers = {config.processes.samplers}",
    }
    if config.launch.sampler is None:
        told["trainer"] = " and ".join(told.values())
    for pool, who in told.items():
        own = {host.index for host in pools if host.pool == pool}
        if own - used:
            right = len(own & used)
            raise UserError(
                f"launch.{pool}.count = {len(own)}: {who} stand on {right} of these hosts, and "
                f"nothing on the others: needs {right}"
            )


def _group(spec: RunSpec, name: str, kind: Kind, places: list[Stand]) -> RoleGroup:
    config = spec.config
    own = PLATFORMS[config.launch.chip]
    platform: Platform = "cpu" if kind == "host" else own
    settings = resolve(own, kind, config.launch.env, spec.run_dir)
    env = variables(own, settings)
    processes = tuple(
        Process(
            rank=rank,
            host=host,
            devices=devices,
            ports=_ports(config, name, rank, len(places)),
            env=env | _masks(platform, devices),
        )
        for rank, (host, devices) in enumerate(places)
    )
    whole = len(places) > 1
    return RoleGroup(
        name=name,
        kind=kind,
        platform=platform,
        processes=processes,
        deadlines=Deadlines(
            start_s=config.deadlines.start_s,
            stop_s=GRACE_S[kind],
        ),
        restarts=config.processes.restarts,
        window_s=WINDOW_S,
        restarted_with="job" if whole else "host",
    )


def _masks(platform: Platform, devices: tuple[int, ...]) -> dict[str, str]:
    """What hides the host's other devices. A TPU's process has its host's whole."""
    if platform == "gpu":
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return {}


def _ports(config: RunConfig, name: str, rank: int, count: int) -> dict[str, tuple[int, ...]]:
    first = config.launch.first_port
    kind, _, index = name.partition("-")
    if kind == "sampler":
        if (port := FIRST_SAMPLER + int(index)) >= PORTS:
            raise UserError(
                f"processes.samplers = {config.processes.samplers}: at most {PORTS - FIRST_SAMPLER}"
            )
        return {"serve": (first + port,)}
    if kind == "trainer" and rank == 0:
        served: dict[str, tuple[int, ...]] = {"link": (first,), "queue": (first + 1,)}
        for index, port in enumerate(("coordinator", "channel") if count > 1 else ()):
            served[port] = tuple(first + 2 + index * ATTEMPTS + i for i in range(ATTEMPTS))
        return served
    return {}


def members(plan: LaunchPlan, host: int) -> Iterator[tuple[RoleGroup, Process]]:
    """What stands on a host."""
    for group in plan.groups:
        for process in group.processes:
            if process.host == host:
                yield group, process
