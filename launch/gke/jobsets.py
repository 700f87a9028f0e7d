"""[N] JobSets: one of the trainer's world with the orchestrator, one of every sampler.

A JobSet restarts as a whole, which is what a world needs and what a sampler must not cause. Every
sampler is one of its own also because replicas of one TPU job would be told that they are slices of
one job.
"""

from collections.abc import Iterator, Sequence

from launch.gke.pods import Manifest, Pods, template, told
from launch.spec import Host, LaunchPlan, RoleGroup

USER_ERROR, AGAIN = 2, 42
API = "jobset.x-k8s.io/v1alpha2"
DRIVER = "driver"
"""The replicated job of the orchestrator."""
QUEUE = {"kueue.x-k8s.io/queue-name": "rl-jax"}
RANK = "$(JOB_COMPLETION_INDEX)"
ENV = (
    told("JOB_COMPLETION_INDEX", "annotations['batch.kubernetes.io/job-completion-index']"),
    told("RL_JAX_ATTEMPT", "labels['jobset.sigs.k8s.io/restart-attempt']"),
)


def host_names(name: str, trainers: int, samplers: int) -> tuple[str, ...]:
    """Of the plan's hosts: JOBSET-REPLICATED-JOB-INDEX.JOBSET, the trainer's first."""
    own = [f"{name}-trainer-0-{i}.{name}" for i in range(trainers)]
    theirs = [f"{name}-s{i}-sampler-0-0.{name}-s{i}" for i in range(samplers)]
    return (*own, *theirs)


def trainer(pods: Pods) -> Manifest:
    """The trainer's hosts. Where roles share one, pods play all of a host; where a process of the
    trainer has its own, the orchestrator has a pod on a node without devices."""
    plan = pods.plan
    hosts = [host for host in plan.hosts if host.pool == "trainer"]
    if not apart(pods):
        # What stands on the samplers' own hosts is played by the pods of `samplers`.
        standing = _on(plan.groups, hosts)
        own = template(pods, "trainer", ("--host", RANK), standing, RANK, ENV)
        return jobset(pods, pods.name, [("trainer", len(hosts), own)])
    world = plan.group("trainer")
    driver = plan.group("orchestrator")
    own = template(pods, "trainer", ("--rank", RANK, "trainer"), [world], RANK, ENV)
    beside = template(pods, "host", ("orchestrator",), [driver], "0", ENV)
    return jobset(pods, pods.name, [("trainer", len(hosts), own), (DRIVER, 1, beside)])


def apart(pods: Pods) -> bool:
    """Whether samplers have hosts of their own, and a trainer's process its host."""
    plan = pods.plan
    hosts = sum(host.pool == "trainer" for host in plan.hosts)
    return hosts < len(plan.hosts) and len(plan.group("trainer").processes) == hosts


def samplers(pods: Pods) -> list[Manifest]:
    """A JobSet for every host of samplers."""
    found = []
    for name, host, standing in sampler_hosts(pods):
        own = template(pods, "sampler", ("--host", host), standing, host, ENV)
        found.append(jobset(pods, name, [("sampler", 1, own)]))
    return found


def sampler_hosts(pods: Pods) -> Iterator[tuple[str, str, list[RoleGroup]]]:
    """(name of its own, index in the plan, what stands there) of each host of samplers."""
    plan = pods.plan
    for number, host in enumerate(host for host in plan.hosts if host.pool == "sampler"):
        yield f"{pods.name}-s{number}", str(host.index), _on(plan.groups, [host])


def _on(groups: Sequence[RoleGroup], hosts: Sequence[Host]) -> list[RoleGroup]:
    """Those with a process on one of `hosts`."""
    own = {host.index for host in hosts}
    return [group for group in groups if any(p.host in own for p in group.processes)]


def jobset(pods: Pods, name: str, jobs: Sequence[tuple[str, int, Manifest]]) -> Manifest:
    """Jobs that are started again together, each of `count` pods."""
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {"name": name, "labels": QUEUE},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True,
                        "subdomain": name},
            "failurePolicy": failure_policy(pods),
            "successPolicy": {"operator": "All"},
            "replicatedJobs": [
                {"name": job, "replicas": 1,
                 "template": one_slice(pods.plan, count) | _job(count, own)}
                for job, count, own in jobs
            ],
        },
    }  # fmt: skip


def failure_policy(pods: Pods) -> Manifest:
    """Of a JobSet: all is started again, unless it is the user's mistake."""
    return {
        "maxRestarts": pods.plan.group("trainer").restarts,
        "rules": [
            # As podFailurePolicy tells it.
            {"name": "mistake", "action": "FailJobSet",
             "onJobFailureReasons": ["PodFailurePolicy"]},
        ],
    }  # fmt: skip


def one_slice(plan: LaunchPlan, count: int) -> Manifest:
    """What keeps the `count` pods of a job on the hosts of one slice, which is a pool of nodes."""
    if plan.chip == "h200" or count == 1:
        return {}
    pool = "cloud.google.com/gke-nodepool"
    return {"metadata": {"annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": pool}}}


def _job(count: int, own: Manifest) -> Manifest:
    """`count` pods that fail together: a JobSet restarts what one of its jobs cannot go on with."""
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            "podFailurePolicy": pod_failure_policy([AGAIN]),
            "template": own,
        }
    }


def pod_failure_policy(orderly: Sequence[int], container: str | None = None) -> Manifest:
    """Of a job: another pod goes on where one was evicted or stopped with a checkpoint, which are
    the statuses `orderly`, and does not count; what is the user's mistake fails the job. Statuses
    are those of `container`, or of every one, what comes before the role included."""
    own = {} if container is None else {"containerName": container}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [
        {"action": "Ignore", "onPodConditions": disrupted},
        {"action": "Ignore", "onExitCodes": own | {"operator": "In", "values": [*orderly]}},
        {"action": "FailJob", "onExitCodes": own | {"operator": "In", "values": [USER_ERROR]}},
    ]
    return {"rules": rules}
