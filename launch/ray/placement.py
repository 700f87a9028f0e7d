"""[H] Where the processes of a launch stand on a Ray cluster: a placement group per role group.

A bundle is one process's: its devices, and a CPU for each. On TPUs a group has a slice, whole and
its own, found by its labels; several samplers never share one. The orchestrator has no bundle: it
stands beside the trainer's first process.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from launch.engine.ray import Berth, living_nodes, ray
from launch.ray.slices import NODE, bundle, whole_slices
from launch.spec import LaunchPlan, Process, RoleGroup
from rl_jax.config.base import UserError

LOOK_S = 0.2
TRY_S = 3.0
"""How long a slice is waited for before the next one is tried."""
PATIENCE_S = 3.0
"""After so long a wait it is told what is lacking."""
_MASKS = frozenset({"CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"})
# As in launch.engine.ray.
_groups: Any = import_module("ray.util.placement_group")
_strategies: Any = import_module("ray.util.scheduling_strategies")


class Placement:
    """What is reserved, and until when: `release` gives it back."""

    def __init__(self) -> None:
        self.berths: dict[str, tuple[Berth, ...]] = {}
        """Of each group's processes, in rank order."""
        self._reserved: list[Any] = []

    def release(self) -> None:
        """Whatever stands there is killed."""
        for group in self._reserved:
            _groups.remove_placement_group(group)

    async def reserve(
        self, plan: LaunchPlan, deadline_s: float, note: Callable[[str], None]
    ) -> None:
        """Fills `berths`. UserError, in one line, where a group has no place within `deadline_s`,
        which `note` is told of at once."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                for group in plan.groups:
                    if group.kind != "host":
                        self.berths[group.name] = await self._take(plan, group, note)
        except TimeoutError:
            waiting = next(g for g in plan.groups if g.kind != "host" and g.name not in self.berths)
            raise UserError(f"{_shortage(waiting)}; given up after {deadline_s:g} s") from None
        beside = self.berths["trainer"][0]
        for group in plan.groups:
            if group.kind == "host":
                self.berths[group.name] = (_beside(beside),) * len(group.processes)

    async def _take(
        self, plan: LaunchPlan, group: RoleGroup, note: Callable[[str], None]
    ) -> tuple[Berth, ...]:
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, _tell_shortage, group, note)
        try:
            if group.platform == "tpu":
                return await self._slice(plan, group)
            bundles = [resources(group)] * len(group.processes)
            reserved = self._placement_group(bundles, strategy=strategy(group))
            while not (found := await asyncio.to_thread(_nodes_of, reserved)):
                await asyncio.sleep(LOOK_S)
            order = sorted(found, key=lambda index: (found[index]["NodeManagerAddress"], index))
            return tuple(_berth(reserved, index, found[index]) for index in order)
        finally:
            patience.cancel()

    async def _slice(self, plan: LaunchPlan, group: RoleGroup) -> tuple[Berth, ...]:
        """One slice, so never a multislice: those that there are, in turn, until one is free."""
        topology = plan.trainer_topology if group.kind == "trainer" else plan.sampler_topology
        if topology is None:
            raise UserError(f"launch.{group.kind}.topology: left out, but Ray finds a slice by it")
        while True:
            taken = {berth.node for own in self.berths.values() for berth in own}
            free = [n for n in await asyncio.to_thread(_free_nodes) if n["NodeID"] not in taken]
            for hosts in whole_slices(free, plan.chip, topology, group):
                at = [{NODE: host["NodeID"]} for host in hosts]
                reserved = self._placement_group(map(bundle, hosts), bundle_label_selector=at)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TRY_S):
                        while not (found := await asyncio.to_thread(_nodes_of, reserved)):
                            await asyncio.sleep(LOOK_S)
                        return tuple(_berth(reserved, i, found[i]) for i in sorted(found))
                _groups.remove_placement_group(self._reserved.pop())
            await asyncio.sleep(LOOK_S)

    def _placement_group(self, bundles: Iterable[Mapping[str, float]], **options: Any) -> Any:
        self._reserved.append(_groups.placement_group(list(bundles), **options))
        return self._reserved[-1]


def resources(group: RoleGroup) -> dict[str, int]:
    """What one process of the group takes of a node."""
    devices = len(group.processes[0].devices)
    return {"CPU": devices} | ({"GPU": devices} if group.platform == "gpu" else {})


def strategy(group: RoleGroup) -> str:
    """As the plan has it: together on one host, or one on each, if there are as many nodes."""
    hosts = {process.host for process in group.processes}
    if len(hosts) == 1:
        return "STRICT_PACK"
    return "SPREAD" if len(hosts) == len(group.processes) else "PACK"


def as_placed(
    plan: LaunchPlan, berths: Mapping[str, tuple[Berth, ...]]
) -> tuple[LaunchPlan, tuple[str, ...]]:
    """The plan with its processes on the nodes where Ray has put them, and those nodes' addresses.

    Which devices of its node are a process's own, Ray tells its actor.
    """
    own = {(g.name, p.rank): berths[g.name][p.rank] for g in plan.groups for p in g.processes}
    nodes = list(dict.fromkeys(berth.node for berth in own.values()))

    def moved(group: RoleGroup, process: Process) -> Process:
        host = nodes.index(own[group.name, process.rank].node)
        env = {name: value for name, value in process.env.items() if name not in _MASKS}
        return process.model_copy(update={"host": host, "env": env})

    groups = tuple(
        group.model_copy(update={"processes": tuple(moved(group, p) for p in group.processes)})
        for group in plan.groups
    )
    addresses = {berth.node: berth.host for berth in own.values()}
    return plan.model_copy(update={"groups": groups}), tuple(addresses[node] for node in nodes)


def leaving(berths: Mapping[str, tuple[Berth, ...]]) -> str:
    """The address of a node of theirs that is about to go; empty where none is."""
    going = import_module("ray._private.state").state.get_draining_nodes()
    found = (b.host for own in berths.values() for b in own if b.node in going)
    return next(found, "")


def _free_nodes() -> list[dict[str, Any]]:
    """Those none of whose chips are in use, as far as is known by now."""
    free = import_module("ray._private.state").available_resources_per_node()
    return [
        node
        for name, node in living_nodes().items()
        if free.get(name, {}).get("TPU") == node["Resources"].get("TPU")
    ]


def _nodes_of(reserved: Any) -> dict[int, dict[str, Any]]:
    """By bundle; empty until all are placed, on nodes that live."""
    state = _groups.placement_group_table(reserved)
    if state.get("state") != "CREATED":
        return {}
    nodes, at = living_nodes(), state["bundles_to_node_id"]
    return {i: nodes[node] for i, node in at.items()} if nodes.keys() >= set(at.values()) else {}


def _berth(reserved: Any, index: int, node: Mapping[str, Any]) -> Berth:
    taken = dict(reserved.bundle_specs[index])
    options = {
        "num_cpus": taken.pop("CPU", 0),
        "num_gpus": taken.pop("GPU", 0),
        "resources": taken,
        "scheduling_strategy": _strategies.PlacementGroupSchedulingStrategy(
            placement_group=reserved, placement_group_bundle_index=index
        ),
    }
    return Berth(options, node["NodeID"], node["NodeManagerAddress"])


def _beside(berth: Berth) -> Berth:
    """Without resources, so never behind anybody's bundle."""
    scheduling = _strategies.NodeAffinitySchedulingStrategy(node_id=berth.node, soft=False)
    return Berth({"num_cpus": 0, "scheduling_strategy": scheduling}, berth.node, berth.host)


def _tell_shortage(group: RoleGroup, note: Callable[[str], None]) -> None:
    note(f"waiting for room: {_shortage(group)}")


def _shortage(group: RoleGroup) -> str:
    """What a group needs, and what there is."""
    devices = len(group.processes[0].devices)
    kind = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}[group.platform]
    free, whole = ray.available_resources(), ray.cluster_resources()
    nodes = Counter(int(node["Resources"].get(kind, 0)) for node in living_nodes().values())
    have = ", ".join(f"{count} of {own}" for own, count in sorted(nodes.items()))
    return (
        f"{group.name} needs {len(group.processes)} x {devices} {kind}, the cluster has "
        f"{int(free.get(kind, 0))} free of {int(whole.get(kind, 0))} (nodes: {have})"
    )
