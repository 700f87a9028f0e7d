"""[N] Kueue: the queue that what is launched waits in, each until all that it asks for is there.

Each is admitted for itself: samplers may start before their trainer, and wait for it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from launch.gke.pods import Manifest

API = "kueue.x-k8s.io/v1beta1"
QUEUE = "rl-jax"
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def queue(launched: Sequence[Manifest]) -> list[Manifest]:
    """A flavor, a cluster's queue with all that is `launched` requests as its quota, and a queue of
    the namespace. What a pod requests and the queue does not cover would keep it out for ever."""
    quota: Counter[str] = Counter()
    for manifest in launched:
        for own, count in templates(manifest):
            for name, amount in requests(own["spec"]).items():
                quota[name] += amount * count
    resources = [{"name": name, "nominalQuota": count} for name, count in quota.items()]
    return [
        {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": QUEUE}, "spec": {}},
        {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": QUEUE},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [
                    {
                        "coveredResources": list(quota),
                        "flavors": [{"name": QUEUE, "resources": resources}],
                    }
                ],
            },
        },
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": QUEUE},
            "spec": {"clusterQueue": QUEUE},
        },
    ]


def templates(manifest: Manifest) -> Iterator[tuple[Manifest, int]]:
    """The pod templates of what is launched, and how many pods there are of each."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "JobSet":
            for job in spec["replicatedJobs"]:
                own = job["template"]["spec"]
                yield own["template"], job["replicas"] * own["completions"]
        case "LeaderWorkerSet":
            own = spec["leaderWorkerTemplate"]
            yield own["workerTemplate"], spec["replicas"] * own["size"]
        case "RayJob":
            yield spec["submitterPodTemplate"], 1
            yield spec["rayClusterSpec"]["headGroupSpec"]["template"], 1
            for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
                yield group["template"], group["replicas"] * group["numOfHosts"]


def requests(spec: Manifest) -> Counter[str]:
    """Of a pod: its containers and those beside them; what comes before them takes no more."""
    beside = [own for own in spec.get("initContainers", ()) if own.get("restartPolicy") == "Always"]
    found: Counter[str] = Counter()
    for container in [*spec["containers"], *beside]:
        for name, text in container["resources"]["requests"].items():
            found[name] += quantity(text)
    return found


def quantity(text: str) -> int:
    """A whole number of what Kubernetes writes as "8" or "32Gi"; bytes for memory."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)
