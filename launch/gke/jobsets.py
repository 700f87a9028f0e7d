"""[N] JobSets: one of the trainer's world with the orchestrator, one of every sampler.

A JobSet restarts as a whole, which is what a world needs and what a sampler must not cause. Every
sampler is one of its own also because replicas of one TPU job would be told that they are slices of
one job.
"""

from collections.abc import Sequence

from launch.gke.pods import Manifest, Pods, template
from launch.spec import RoleGroup

USER_ERROR, AGAIN = 2, 42
API = "jobset.x-k8s.io/v1alpha2"
DRIVER = "driver"
"""The replicated job of the orchestrator."""


def host_names(name: str, trainers: int, samplers: int) -> tuple[str, ...]:
    """Of the plan's hosts: JOBSET-REPLICATED-JOB-INDEX.JOBSET, the trainer's first."""
    own = [f"{name}-trainer-0-{i}.{name}" for i in range(trainers)]
    theirs = [f"{name}-s{i}-sampler-0-0.{name}-s{i}" for i in range(samplers)]
    return (*own, *theirs)


def trainer(pods: Pods) -> Manifest:
    """The trainer's hosts. With samplers on them, pods play all of a host; without, the
    orchestrator has a pod on a node without devices."""
    plan = pods.plan
    hosts = [host for host in plan.hosts if host.pool == "trainer"]
    rank = "$(JOB_COMPLETION_INDEX)"
    if not apart(pods):
        standing = {process.host for group in plan.groups for process in group.processes}
        own = template(pods, "trainer", ("--host", rank), plan.groups)
        return _jobset(pods, pods.name, [("trainer", len(standing), own)])
    world = plan.group("trainer")
    driver = plan.group("orchestrator")
    own = template(pods, "trainer", ("--rank", rank, "trainer"), [world])
    beside = template(pods, "host", ("orchestrator",), [driver])
    return _jobset(pods, pods.name, [("trainer", len(hosts), own), (DRIVER, 1, beside)])


def apart(pods: Pods) -> bool:
    """Whether samplers have hosts of their own, and a trainer's process its host."""
    plan = pods.plan
    hosts = sum(host.pool == "trainer" for host in plan.hosts)
    return hosts < len(plan.hosts) and len(plan.group("trainer").processes) == hosts


def samplers(pods: Pods) -> list[Manifest]:
    """A JobSet for every host of samplers."""
    plan = pods.plan
    found = []
    for index, host in enumerate(host for host in plan.hosts if host.pool == "sampler"):
        standing = _on(plan.groups, host.index)
        if standing:
            own = template(pods, "sampler", ("--host", str(host.index)), standing)
            found.append(_jobset(pods, f"{pods.name}-s{index}", [("sampler", 1, own)]))
    return found


def _on(groups: Sequence[RoleGroup], host: int) -> list[RoleGroup]:
    return [group for group in groups if any(p.host == host for p in group.processes)]


def _jobset(pods: Pods, name: str, jobs: Sequence[tuple[str, int, Manifest]]) -> Manifest:
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "rl-jax"}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True,
                        "subdomain": name},
            "failurePolicy": {
                "maxRestarts": pods.plan.group("trainer").restarts,
                "rules": [
                    # What the user got wrong, as podFailurePolicy tells it.
                    {"name": "mistake", "action": "FailJobSet",
                     "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "successPolicy": {"operator": "All"},
            "replicatedJobs": [
                {"name": job, "replicas": 1, "template": _job(count, own)}
                for job, count, own in jobs
            ],
        },
    }  # fmt: skip


def _job(count: int, own: Manifest) -> Manifest:
    """`count` pods that fail together: a JobSet restarts what one of its jobs cannot go on with."""
    container = own["spec"]["containers"][0]["name"]
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # Stopped with a checkpoint: another pod goes on, and it does not count as a failure.
        {"action": "Ignore",
         "onExitCodes": {"containerName": container, "operator": "In", "values": [AGAIN]}},
        {"action": "FailJob",
         "onExitCodes": {"containerName": container, "operator": "In", "values": [USER_ERROR]}},
    ]  # fmt: skip
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules},
            "template": own,
        }
    }
