"""[N] The pod of one role: containers, probes, resources and what ends it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.spec import Host, LaunchPlan, RoleGroup
from rl_jax.config.base import UserError

Manifest = dict[str, Any]

MARGIN_S = 30
"""From the plan's own KILL, which ends a role orderly, to the kubelet's."""
MACHINES = {
    ("v5p", 4): ("tpu-v5p-slice", "google.com/tpu"),
    ("v6e", 1): ("tpu-v6e-device", "google.com/tpu"),
    ("v6e", 4): ("tpu-v6e-slice", "google.com/tpu"),
    ("v6e", 8): ("tpu-v6e-slice", "google.com/tpu"),
    ("h200", 8): ("nvidia-h200-141gb", "nvidia.com/gpu"),
}
"""(chip, devices of a host) -> the node's accelerator label, the resource."""
CLAIM = "rl-jax-shared"
"""The disk that all pods see."""
USER = 1000
"""Of the image: no process is root."""


class Pods(NamedTuple):
    """What all pods of a launch have in common."""

    plan: LaunchPlan
    image: str
    hosts: tuple[str, ...]
    """Names of the plan's hosts inside the cluster."""

    @property
    def name(self) -> str:
        return name_of(self.plan)


def name_of(plan: LaunchPlan) -> str:
    """The run's name as the name of a cluster's objects."""
    return plan.name.lower().replace("_", "-").replace(".", "-")


def template(pods: Pods, kind: str, played: Sequence[str], groups: Sequence[RoleGroup]) -> Manifest:
    """The pod template of `groups`; `played` is what comes after `rl-jax role` and the plan."""
    host = pods.plan.hosts[groups[0].processes[0].host]
    on_device = kind != "host"
    container: Manifest = {
        "name": kind,
        "image": pods.image,
        "args": ["rl-jax", "role", "--plan", "/plan/plan.json", *played],
        "env": _env(pods),
        "ports": [{"containerPort": port} for port in _ports(groups)],
        "resources": _resources(pods.plan, host) if on_device else _CPU_ONLY,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": _probe("alive", period_s=10, failures=180),
        "livenessProbe": _probe("alive", period_s=20, failures=6),
        "volumeMounts": [
            {"name": "plan", "mountPath": "/plan", "readOnly": True},
            {"name": "shared", "mountPath": "/shared"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(max(group.deadlines.stop_s for group in groups))
        + MARGIN_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
        "containers": [container],
        "volumes": _volumes(pods),
    }
    if on_device:
        spec["nodeSelector"] = _selector(pods.plan, host)
        spec["tolerations"] = [{"operator": "Exists", "key": resource(pods.plan, host)}]
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return {"metadata": {"annotations": annotations}, "spec": spec}


_CPU_ONLY: Manifest = {"requests": {"cpu": "8", "memory": "32Gi"}}


def _volumes(pods: Pods) -> list[Manifest]:
    return [
        {"name": "plan", "configMap": {"name": f"{pods.name}-plan"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _env(pods: Pods) -> list[Manifest]:
    """What the entry needs; the roles' own environment is in the plan."""
    token = {"name": f"{pods.name}-token", "key": "token"}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    attempt = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    return [
        {"name": "RL_JAX_TOKEN", "valueFrom": {"secretKeyRef": token}},
        {"name": "RL_JAX_HOSTS", "value": ",".join(pods.hosts)},
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "RL_JAX_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": attempt}}},
        {"name": "RL_JAX_ALIVE", "value": "/tmp/alive"},
    ]


def _ports(groups: Sequence[RoleGroup]) -> list[int]:
    served = [process.ports.values() for group in groups for process in group.processes]
    return sorted(port for ports in served for own in ports for port in own)


def _probe(name: str, *, period_s: int, failures: int) -> Manifest:
    """The supervisor touches the file while its loop turns: a long compilation or step is alive."""
    fresh = f'test -n "$(find /tmp/{name} -newermt "-60 seconds")"'
    return {
        "exec": {"command": ["sh", "-c", fresh]},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def _machine(plan: LaunchPlan, host: Host) -> tuple[str, str]:
    if (found := MACHINES.get((plan.chip, host.devices))) is None:
        known = ", ".join(f"{chip} x {count}" for chip, count in MACHINES)
        raise UserError(f"launch: GKE has no node of {host.devices} {plan.chip}; there is {known}")
    return found


def resource(plan: LaunchPlan, host: Host) -> str:
    """What a pod asks for to get a host's devices."""
    return _machine(plan, host)[1]


def _selector(plan: LaunchPlan, host: Host) -> Mapping[str, str]:
    label, _ = _machine(plan, host)
    if plan.chip == "h200":
        return {"cloud.google.com/gke-accelerator": label}
    topology = plan.trainer_topology if host.pool == "trainer" else plan.sampler_topology
    found = {"cloud.google.com/gke-tpu-accelerator": label}
    return found | ({"cloud.google.com/gke-tpu-topology": topology} if topology else {})


def _resources(plan: LaunchPlan, host: Host) -> Manifest:
    own = {resource(plan, host): str(host.devices)}
    return {"requests": own, "limits": own}
