"""Every process of a plan is played by one pod, under the name by which others know its host."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import role
from launch.cli import _parser, main
from launch.gke import render
from launch.gke.jobsets import RANK
from launch.gke.pathways import Images
from launch.slurm import render as slurm
from launch.spec import LaunchPlan, RunSpec, make_plan, members
from launch.tpu_vm import render as tpu_vm
from rl_jax.config.load import load
from tests.launch.targets import golden

CUT = ("qwen3_32b_h200_64", ("processes.trainers=8",))
"""Two processes of the world on each of its hosts, beside samplers on hosts of their own."""
FEWER = ("qwen3_32b_h200_64", ("launch.sampler.count=1", "processes.samplers=2"))
ALL = [*((path.stem, ()) for path in sorted(golden.PODS.glob("*.toml"))), CUT, FEWER]


def planned(name: str, settings: tuple[str, ...]) -> LaunchPlan:
    return make_plan(RunSpec(load(golden.PODS / f"{name}.toml", settings), "/shared/run"))


def manifests(plan: LaunchPlan, form: str) -> Iterator[dict[str, Any]]:
    for name, text in render.files(plan, form, "image", Images("", "", "")).items():
        if name.endswith(".yaml"):
            yield from yaml.safe_load_all(text)


PARSER = _parser()
Pod = tuple[str, dict[str, Any], int]
"""The name by which others know it, its specification, its index in its job."""


def pods(plan: LaunchPlan, form: str) -> Iterator[Pod]:
    """Those that play roles, of JobSets and LeaderWorkerSets."""
    for document in manifests(plan, form):
        name, spec = document["metadata"]["name"], document["spec"]
        if document["kind"] == "LeaderWorkerSet":
            own = spec["leaderWorkerTemplate"]
            assert spec["replicas"] == own["size"] == 1
            yield f"{name}-0.{name}", own["workerTemplate"]["spec"], 0
        for job in spec.get("replicatedJobs", ()):
            inside = job["template"]["spec"]
            for index in range(inside["completions"]):
                known = f"{name}-{job['name']}-0-{index}.{name}"
                yield known, inside["template"]["spec"], index


def played(plan: LaunchPlan, pod: Pod) -> Iterator[tuple[str, int]]:
    """(group, rank) of what a pod plays, where it stands on the host that others look for there."""
    known, spec, index = pod
    (container,) = spec["containers"]
    told = {own["name"]: own.get("value", "") for own in container["env"]}
    hosts = told["RL_JAX_HOSTS"].split(",")
    program, *argv = [word.replace(RANK, str(index)) for word in container["args"]]
    assert program == "rl-jax"
    given = PARSER.parse_args(argv)
    ports = {port["containerPort"] for port in container["ports"]}
    for group, process in role._mine(plan, given.name, given.host, given.rank):
        # Nobody connects to an orchestrator that has a pod of its own.
        assert hosts[process.host] == known or container["name"] == "host"
        assert ports >= {port for served in process.ports.values() for port in served}
        yield group.name, process.rank


@pytest.mark.parametrize("form", ["jobset", "lws"])
@pytest.mark.parametrize(("name", "settings"), ALL)
def test_every_process_has_one_pod(name: str, settings: tuple[str, ...], form: str) -> None:
    if form == "lws" and name.endswith("h200_8"):
        pytest.skip("its samplers stand on the trainer's host")
    plan = planned(name, settings)
    found = Counter(each for pod in pods(plan, form) for each in played(plan, pod))
    assert found == Counter((g.name, p.rank) for g in plan.groups for p in g.processes)


def test_pods_of_a_pool_serve_its_ports_alone() -> None:
    """Where several processes of the world share a host, samplers elsewhere."""
    trainers = [spec for known, spec, _ in pods(planned(*CUT), "jobset") if "-trainer-0-" in known]
    assert len(trainers) == 4
    ports = [port["containerPort"] for port in trainers[0]["containers"][0]["ports"]]
    assert ports == list(range(7400, 7400 + 2 + 2 * 16)), "no sampler's, from 7500 on"


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_other_targets_have_as_many_machines(name: str, settings: tuple[str, ...]) -> None:
    """Those that play `--host N`, for all N: the trainer's first, and something on each."""
    plan = planned(name, settings)
    if plan.chip == "h200":
        text = slurm.files(plan, het_group=False)["job.env"]
    else:
        text = tpu_vm.files(plan)["launch.env"]
    told = dict(line.split("=") for line in text.splitlines())
    counts = int(told["TRAINER_HOSTS"]), int(told["SAMPLER_HOSTS"])
    pools = [host.pool for host in plan.hosts]
    assert pools == ["trainer"] * counts[0] + ["sampler"] * counts[1]
    assert all(list(members(plan, host)) for host in range(sum(counts)))


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_ray_has_a_worker_for_every_host(name: str, settings: tuple[str, ...]) -> None:
    plan = planned(name, settings)
    (job,) = [own for own in manifests(plan, "rayjob") if own["kind"] == "RayJob"]
    found = {
        own["groupName"]: own["replicas"] * own["numOfHosts"]
        for own in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    }
    assert found == dict(Counter(host.pool for host in plan.hosts))


def test_a_host_without_a_process_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod, out = str(golden.PODS / "qwen3_32b_h200_64.toml"), str(tmp_path / "out")
    argv = ["render", pod, "--target", "slurm", "--out", out, "--set", "processes.samplers=2"]
    assert main(argv) == 2
    said = "launch.sampler.count = 4: processes.samplers = 2 stand on 1 of these hosts, and nothing"
    assert capsys.readouterr().err == f"rl-jax: {said} on the others: needs 1\n"
    assert main([*argv, "--set", "launch.sampler.count=1"]) == 0
