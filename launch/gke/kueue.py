"""[N] Kueue: the queue that a launch's JobSets wait in, each until all that it asks for is there.

Each JobSet is admitted for itself: samplers may start before their trainer, and wait for it.
"""

from collections import Counter
from collections.abc import Sequence

from launch.gke.pods import Manifest

API = "kueue.x-k8s.io/v1beta1"
QUEUE = "rl-jax"
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def queue(jobsets: Sequence[Manifest]) -> list[Manifest]:
    """A flavor, a cluster's queue with all that `jobsets` request as its quota, and a queue of the
    namespace. What a pod requests and the queue does not cover would keep it out for ever."""
    quota: Counter[str] = Counter()
    for jobset in jobsets:
        for job in jobset["spec"]["replicatedJobs"]:
            own = job["template"]["spec"]
            for container in own["template"]["spec"]["containers"]:
                for name, text in container["resources"]["requests"].items():
                    quota[name] += quantity(text) * own["completions"]
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


def quantity(text: str) -> int:
    """A whole number of what Kubernetes writes as "8" or "32Gi"; bytes for memory."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)
