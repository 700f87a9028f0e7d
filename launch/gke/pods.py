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


def template(
    pods: Pods,
    kind: str,
    played: Sequence[str],
    groups: Sequence[RoleGroup],
    host: str,
    env: Sequence[Manifest],
) -> Manifest:
    """The pod template of `groups`; `played` is what comes after `rl-jax role` and the plan. `host`
    is the index of the plan's host, and `env` of it and of the attempt, as a container is told."""
    own = pods.plan.hosts[groups[0].processes[0].host]
    on_device = kind != "host"
    wanted = resources(pods.plan, own) if on_device else CPU_ONLY
    container: Manifest = {
        "name": kind,
        "image": pods.image,
        "args": ["rl-jax", "role", "--plan", "/plan/plan.json", *played],
        "env": [*_env(pods), *env],
        "ports": [{"containerPort": port} for port in _ports(groups)],
        "resources": wanted,
        "securityContext": UNPRIVILEGED,
        "startupProbe": _probe("alive", period_s=10, failures=180),
        "livenessProbe": _probe("alive", period_s=20, failures=6),
        "volumeMounts": MOUNTS,
    }  # fmt: skip
    stop_s = max(group.deadlines.stop_s for group in groups)
    spec = pod(pods, [container], stop_s) | placed(pods.plan, own if on_device else None)
    checked = _preflight(pods, host, env, wanted, devices=on_device and _alone(pods.plan, own))
    return {"metadata": metadata(pods), "spec": spec | {"initContainers": [checked]}}


def _preflight(
    pods: Pods, host: str, env: Sequence[Manifest], wanted: Manifest, *, devices: bool
) -> Manifest:
    """What a host can check by itself, before its roles start."""
    checked = ["rl-jax", "preflight", "/plan/config.toml", "--plan", "/plan/plan.json", "--alone"]
    return {
        "name": "preflight",
        "image": pods.image,
        "args": [*checked, "--host", host, *([] if devices else ["--no-devices"])],
        "env": list(env),
        "resources": wanted,
        "securityContext": UNPRIVILEGED,
        "volumeMounts": MOUNTS,
    }


def _alone(plan: LaunchPlan, host: Host) -> bool:
    """Whether a host's devices answer without others: a slice of several hosts wants all of them
    at once, and pods are not checked at one time."""
    return plan.chip == "h200" or sum(other.pool == host.pool for other in plan.hosts) == 1 or (
        host.pool == "sampler"
    )  # fmt: skip


def pod(pods: Pods, containers: Sequence[Manifest], stop_s: float) -> Manifest:
    """A pod that may take `stop_s` from TERM to its end, and is not started again where it is."""
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(stop_s) + MARGIN_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
        "containers": list(containers),
        "volumes": _volumes(pods),
    }


def placed(plan: LaunchPlan, host: Host | None) -> Manifest:
    """What of a pod's specification brings it to a host with those devices; None: any node."""
    if host is None:
        return {}
    return {
        "nodeSelector": _selector(plan, host),
        "tolerations": [{"operator": "Exists", "key": resource(plan, host)}],
    }


def metadata(pods: Pods) -> Manifest:
    """Of a pod: whose it is, and that an autoscaler leaves it where it is."""
    return {
        "labels": {"app.kubernetes.io/instance": pods.name},
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
    }


UNPRIVILEGED: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
MOUNTS: list[Manifest] = [
    {"name": "plan", "mountPath": "/plan", "readOnly": True},
    {"name": "shared", "mountPath": "/shared"},
    {"name": "shm", "mountPath": "/dev/shm"},
]
CPU_ONLY: Manifest = {"requests": {"cpu": "8", "memory": "32Gi"}}


def _volumes(pods: Pods) -> list[Manifest]:
    return [
        {"name": "plan", "configMap": {"name": f"{pods.name}-plan"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _env(pods: Pods) -> list[Manifest]:
    """What the entry needs; the roles' own environment is in the plan."""
    token = {"name": f"{pods.name}-token", "key": "token"}
    return [
        {"name": "RL_JAX_TOKEN", "valueFrom": {"secretKeyRef": token}},
        {"name": "RL_JAX_HOSTS", "value": ",".join(pods.hosts)},
        {"name": "RL_JAX_ALIVE", "value": "/tmp/alive"},
    ]


def told(name: str, field: str) -> Manifest:
    """A variable that holds what the cluster wrote into the pod's own `field`."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{field}"}}}


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


def resources(plan: LaunchPlan, host: Host) -> Manifest:
    """What a pod takes of a host: all its devices."""
    own = {resource(plan, host): str(host.devices)}
    return {"requests": own, "limits": own}
