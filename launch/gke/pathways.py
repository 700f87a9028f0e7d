"""[N] Pathways: the one-process mode over whole slices, whose devices it sees as its own.

A JobSet of a head without devices, where `rl-jax run` is the user's container beside Pathways'
resource manager and proxy, and of workers, a job for each slice. There is no second code path: jax
finds more devices.
"""

from math import prod
from typing import NamedTuple

from launch.gke.jobsets import API, QUEUE, failure_policy, one_slice, pod_failure_policy
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
    told,
)
from launch.spec import Host
from rl_jax.config.base import UserError

HEAD, WORKER = "pathways-head", "worker"
MANAGER_PORT, PROXY_PORT, WORKER_PORT = 29001, 29000, 29005
RUN = "run"
"""The user's container."""
STOPPED = (130, 143)
"""What `rl-jax run` ends with where a signal stopped it, with a checkpoint."""
KINDS = {"v5p": "tpuv5", "v6e": "tpuv6e"}
"""Of a slice, as the resource manager names it."""
SIDECARS = {"manager": ("8", "32Gi"), "proxy": ("16", "100Gi")}
"""Cores and memory: programs and arguments of all devices go through the proxy."""
TOLD = {
    "JOBSET_NAME": "annotations['jobset.sigs.k8s.io/jobset-name']",
    "REPLICATED_JOB_NAME": "annotations['jobset.sigs.k8s.io/replicatedjob-name']",
}
SLICE = {
    "MEGASCALE_NUM_SLICES": "labels['jobset.sigs.k8s.io/replicatedjob-replicas']",
    "MEGASCALE_SLICE_ID": "labels['jobset.sigs.k8s.io/job-index']",
}


class Images(NamedTuple):
    """Pathways' own, of the release that goes with jax's, and a bucket that it may write to."""

    server: str
    proxy: str
    scratch: str


def pathways(pods: Pods, images: Images) -> Manifest:
    """The JobSet; the plan's hosts are those of all slices. UserError where it has no slice."""
    plan = pods.plan
    if plan.chip not in KINDS or plan.trainer_topology is None:
        raise UserError("--as pathways: needs a slice: launch.chip v5p or v6e, and its topology")
    host = plan.hosts[0]
    each = prod(map(int, plan.trainer_topology.split("x"))) // host.devices
    count = len(plan.hosts) // each
    head = f"{pods.name}-{HEAD}-0-0.{pods.name}"
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": pods.name, "labels": QUEUE},
        "spec": {
            "coordinator": {"replicatedJob": HEAD},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True,
                        "subdomain": pods.name},
            "failurePolicy": failure_policy(pods),
            # Workers have no end of their own.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [HEAD]},
            "replicatedJobs": [
                {"name": HEAD, "replicas": 1,
                 "template": {"spec": _job(1, 0, _head(pods, images, head, count)) | {
                     # Those beside it end by a signal whatever it ended with.
                     "podFailurePolicy": pod_failure_policy(STOPPED, RUN)}}},
                {"name": WORKER, "replicas": count,
                 "template": one_slice(plan, each) | {
                     "spec": _job(each, 4 * each, _worker(pods, images, head, host))}},
            ],
        },
    }  # fmt: skip


def _job(count: int, failures: int, own: Manifest) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": failures,
        "template": own,
    }


def _head(pods: Pods, images: Images, head: str, count: int) -> Manifest:
    plan = pods.plan
    kind = f"{KINDS[plan.chip]}:{plan.trainer_topology}"
    manager = _sidecar("manager", images.server, MANAGER_PORT, [
        f"--server_port={MANAGER_PORT}",
        f"--gcs_scratch_location={images.scratch}",
        "--node_type=resource_manager",
        f"--instance_count={count}",
        f"--instance_type={kind}",
    ])  # fmt: skip
    manager["env"] = [
        *(told(name, field) for name, field in TOLD.items()),
        {"name": "HOST_ADDRESS", "value": head},
        {"name": "TPU_SKIP_MDS_QUERY", "value": "true"},
    ]
    proxy = _sidecar("proxy", images.proxy, PROXY_PORT, [
        f"--server_port={PROXY_PORT}",
        f"--resource_manager_address={head}:{MANAGER_PORT}",
        f"--gcs_scratch_location={images.scratch}",
    ])  # fmt: skip
    own: Manifest = {
        "name": RUN,
        "image": pods.image,
        "args": ["bash", "/plan/entry.sh"],
        "env": [
            {"name": "JAX_PLATFORMS", "value": "proxy"},
            {"name": "JAX_BACKEND_TARGET", "value": f"grpc://localhost:{PROXY_PORT}"},
            {"name": "XCLOUD_ENVIRONMENT", "value": "GCP"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "resources": CPU_ONLY,
        "securityContext": UNPRIVILEGED | {"runAsNonRoot": True, "runAsUser": USER},
        "volumeMounts": MOUNTS,
    }
    spec = pod(pods, [own], plan.group("trainer").deadlines.stop_s)
    # Images that are not ours run as who they were made for.
    others = {"initContainers": [manager, proxy], "securityContext": {"fsGroup": USER}}
    return {"metadata": metadata(pods), "spec": spec | others}


def _sidecar(name: str, image: str, port: int, arguments: list[str]) -> Manifest:
    """Runs beside the user's container, and ends with it."""
    cores, memory = SIDECARS[name]
    return {
        "name": f"pathways-{name}",
        "image": image,
        "args": arguments,
        "restartPolicy": "Always",
        "ports": [{"containerPort": port}],
        "resources": {"requests": {"cpu": cores, "memory": memory}},
    }


def _worker(pods: Pods, images: Images, head: str, host: Host) -> Manifest:
    container: Manifest = {
        "name": "pathways-worker",
        "image": images.server,
        "args": [
            f"--server_port={WORKER_PORT}",
            f"--resource_manager_address={head}:{MANAGER_PORT}",
            f"--gcs_scratch_location={images.scratch}",
        ],
        "env": [
            *(told(name, field) for name, field in (TOLD | SLICE).items()),
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": head},
            {"name": "XCLOUD_ENVIRONMENT", "value": "GCP"},
        ],
        "ports": [{"containerPort": WORKER_PORT}],
        "resources": resources(pods.plan, host),
    }
    spec = {"restartPolicy": "OnFailure", "containers": [container]}
    return {"metadata": metadata(pods), "spec": spec | placed(pods.plan, host)}
