"""[N] LeaderWorkerSets: a sampler as a group of pods that is started again as a whole, for itself.

Other than a JobSet it has no end and no budget: a sampler whose run is finished finds that out each
time it is started, until `rl-jax stop` takes it away.
"""

from launch.gke.jobsets import QUEUE, sampler_hosts
from launch.gke.pods import Manifest, Pods, template
from rl_jax.config.base import UserError

API = "leaderworkerset.x-k8s.io/v1"


def samplers(pods: Pods) -> list[Manifest]:
    """A LeaderWorkerSet for every host of samplers. UserError where they have none of their own."""
    found = [
        _set(name, template(pods, "sampler", ("--host", host), standing, host, ()))
        for name, host, standing in sampler_hosts(pods)
    ]
    if not found:
        raise UserError("--as lws: needs hosts in launch.sampler")
    return found


def host_names(name: str, count: int) -> tuple[str, ...]:
    """Of the samplers' hosts: SET-REPLICA.SET, since every set has a headless service."""
    return tuple(f"{name}-s{i}-0.{name}-s{i}" for i in range(count))


def _set(name: str, own: Manifest) -> Manifest:
    # What a set's pods are made by allows nothing else.
    always = own | {"spec": own["spec"] | {"restartPolicy": "Always"}}
    return {
        "apiVersion": API,
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "labels": QUEUE},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {
                "size": 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": always,
            },
        },
    }
