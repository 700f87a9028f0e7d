"""[N] A RayJob of KubeRay: a head without devices, workers for each pool, and the run as its job.

The head's pod starts `rl-jax run --target ray`; roles are placed on the workers by Ray. Its token
is made by the operator, which gives it to every pod.
"""

from launch.gke.jobsets import QUEUE
from launch.gke.pods import (
    CPU_ONLY,
    MOUNTS,
    UNPRIVILEGED,
    USER,
    Manifest,
    Pods,
    metadata,
    placed,
    pod,
    resources,
)
from launch.spec import Host

API = "ray.io/v1"
STORE_BYTES = 200 << 20
"""Of Ray's object store: small messages alone go through Ray, and it would take 30% of a node."""
SHM = "8Gi"
"""For that store and the collectives of a host."""
SUBMITTER = {"cpu": "1", "memory": "1Gi"}
MANUAL = {"num-cpus": "0"}
"""The head keeps the cluster; no role stands there."""


def rayjob(pods: Pods) -> Manifest:
    """The job; started again by the operator it goes on with the run, on a new cluster."""
    plan = pods.plan
    groups = []
    for pool in ("trainer", "sampler"):
        hosts = [host for host in plan.hosts if host.pool == pool]
        if hosts:
            groups.append(_workers(pods, pool, hosts))
    return {
        "apiVersion": API,
        "kind": "RayJob",
        "metadata": {"name": pods.name, "labels": QUEUE},
        "spec": {
            "entrypoint": "bash /plan/entry.sh",
            "submissionMode": "K8sJobMode",
            "submitterPodTemplate": _submitter(pods),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": plan.group("trainer").restarts,
            "rayClusterSpec": {
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": _started() | MANUAL,
                    "template": _template(pods, "ray-head", None),
                },
                "workerGroupSpecs": groups,
            },
        },
    }


def _submitter(pods: Pods) -> Manifest:
    """Hands the entry point to the head; told here, so that the queue's quota covers it."""
    container: Manifest = {
        "name": "ray-job-submitter",
        "image": pods.image,
        "resources": {"requests": SUBMITTER, "limits": SUBMITTER},
        "securityContext": UNPRIVILEGED,
    }
    user = {"runAsNonRoot": True, "runAsUser": USER}
    spec = {"restartPolicy": "Never", "securityContext": user, "containers": [container]}
    return {"metadata": metadata(pods), "spec": spec}


def _workers(pods: Pods, pool: str, hosts: list[Host]) -> Manifest:
    """A slice is a replica of all its hosts: the trainer's is one, a sampler's host its own."""
    whole = pool == "trainer" and pods.plan.chip != "h200"
    replicas = 1 if whole else len(hosts)
    return {
        "groupName": pool,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "numOfHosts": len(hosts) // replicas,
        "rayStartParams": _started(),
        "template": _template(pods, "ray-worker", hosts[0]),
    }


def _started() -> dict[str, str]:
    return {"object-store-memory": str(STORE_BYTES)}


def _template(pods: Pods, name: str, host: Host | None) -> Manifest:
    container: Manifest = {
        "name": name,
        "image": pods.image,
        # A role says itself what it may take; what is not a role has no device.
        "env": [{"name": "JAX_PLATFORMS", "value": "cpu"}],
        "resources": CPU_ONLY if host is None else resources(pods.plan, host),
        "securityContext": UNPRIVILEGED,
        "volumeMounts": MOUNTS,
    }
    stop_s = max(group.deadlines.stop_s for group in pods.plan.groups)
    spec = pod(pods, [container], stop_s) | placed(pods.plan, host)
    for volume in spec["volumes"]:
        if volume["name"] == "shm":
            volume["emptyDir"] = {"medium": "Memory", "sizeLimit": SHM}
    # The operator says when a pod is started again.
    del spec["restartPolicy"]
    return {"metadata": metadata(pods), "spec": spec}
