"""The fields of custom resources that our manifests may have, as their APIs name them.

No validator on the package index knows them. What is inside a pod's template, or is a map of the
user's own names, is not looked at (ANY): Kubernetes' own schemas are for the former.
"""

from collections.abc import Iterator
from typing import Any

ANY = None
_JOB = {
    "completionMode": ANY, "completions": ANY, "parallelism": ANY, "backoffLimit": ANY,
    "podFailurePolicy": ANY, "template": ANY,
}  # fmt: skip
_GROUP = {"rayStartParams": ANY, "template": ANY}
FIELDS: dict[str, Any] = {
    "jobset.x-k8s.io/v1alpha2 JobSet": {
        "coordinator": {"replicatedJob": ANY, "jobIndex": ANY, "podIndex": ANY},
        "network": {"enableDNSHostnames": ANY, "publishNotReadyAddresses": ANY, "subdomain": ANY},
        "failurePolicy": {
            "maxRestarts": ANY,
            "restartStrategy": ANY,
            "rules": [
                {"name": ANY, "action": ANY, "onJobFailureReasons": ANY,
                 "targetReplicatedJobs": ANY}
            ],
        },
        "successPolicy": {"operator": ANY, "targetReplicatedJobs": ANY},
        "suspend": ANY,
        "ttlSecondsAfterFinished": ANY,
        "replicatedJobs": [
            {"name": ANY, "replicas": ANY, "template": {"metadata": ANY, "spec": _JOB}}
        ],
    },
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        "replicas": ANY,
        "startupPolicy": ANY,
        "rolloutStrategy": ANY,
        "networkConfig": {"subdomainPolicy": ANY},
        "leaderWorkerTemplate": {
            "size": ANY, "restartPolicy": ANY, "leaderTemplate": ANY, "workerTemplate": ANY,
            "subGroupPolicy": ANY,
        },
    },
    "ray.io/v1 RayJob": {
        "entrypoint": ANY,
        "submissionMode": ANY,
        "submitterPodTemplate": ANY,
        "shutdownAfterJobFinishes": ANY,
        "ttlSecondsAfterFinished": ANY,
        "activeDeadlineSeconds": ANY,
        "backoffLimit": ANY,
        "suspend": ANY,
        "rayClusterSpec": {
            "rayVersion": ANY,
            "authOptions": {"mode": ANY, "secretName": ANY},
            "headGroupSpec": _GROUP,
            "workerGroupSpecs": [
                {"groupName": ANY, "replicas": ANY, "minReplicas": ANY, "maxReplicas": ANY,
                 "numOfHosts": ANY, **_GROUP}
            ],
        },
    },
    "kueue.x-k8s.io/v1beta1 ResourceFlavor": {"nodeLabels": ANY, "tolerations": ANY},
    "kueue.x-k8s.io/v1beta1 LocalQueue": {"clusterQueue": ANY},
    "kueue.x-k8s.io/v1beta1 ClusterQueue": {
        "namespaceSelector": ANY,
        "queueingStrategy": ANY,
        "cohort": ANY,
        "resourceGroups": [
            {"coveredResources": ANY,
             "flavors": [{"name": ANY, "resources": [{"name": ANY, "nominalQuota": ANY}]}]}
        ],
    },
}  # fmt: skip


def unknown(document: dict[str, Any]) -> list[str]:
    """Paths of fields that the resource does not have. KeyError for another resource."""
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    known = FIELDS[f"{document['apiVersion']} {document['kind']}"]
    return list(_unknown(document["spec"], known, "spec"))


def _unknown(value: Any, known: Any, path: str) -> Iterator[str]:
    if isinstance(known, list):
        assert isinstance(value, list), path
        for item in value:
            yield from _unknown(item, known[0], path)
    elif isinstance(known, dict):
        assert isinstance(value, dict), path
        for name, inner in value.items():
            if name in known:
                yield from _unknown(inner, known[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
