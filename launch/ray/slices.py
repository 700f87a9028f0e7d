"""[N] TPU slices among a Ray cluster's nodes, by the labels that Ray gives them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from launch.spec import RoleGroup

NODE, SLICE, WORKER = "ray.io/node-id", "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
TOPOLOGY, POD = "ray.io/tpu-topology", "ray.io/tpu-pod-type"

Node = Mapping[str, Any]
"""As `ray.nodes()` has it."""


def whole_slices(
    nodes: Iterable[Node], chip: str, topology: str, group: RoleGroup
) -> list[list[Node]]:
    """The slices of that chip and topology all of whose hosts are among `nodes`, one host for each
    process of the group, in the slice's own order."""
    hosts: dict[str, dict[int, Node]] = defaultdict(dict)
    chips = len(group.processes[0].devices)
    for node in nodes:
        labels = node["Labels"]
        kind = labels.get(POD, "").partition("-")[0]
        if (kind, labels.get(TOPOLOGY), node["Resources"].get("TPU")) == (chip, topology, chips):
            # A slice of one host may have no name.
            own = hosts[labels.get(SLICE, node["NodeID"])]
            own[int(labels.get(WORKER, 0))] = node
    whole = range(len(group.processes))
    return [[own[i] for i in whole] for own in hosts.values() if own.keys() == set(whole)]


def bundle(node: Node) -> dict[str, float]:
    """All of a host: its chips, and what stands for its slice with those who reserve that first."""
    resources = node["Resources"]
    heads = {name: 1.0 for name in resources if name.startswith("TPU-") and name.endswith("-head")}
    return {"CPU": 1.0, "TPU": resources["TPU"], **heads}
