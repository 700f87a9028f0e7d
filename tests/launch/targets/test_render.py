"""What `rl-jax render` writes: as it was, readable by who reads it, and complete."""

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.gke import kueue
from launch.slurm import render as slurm
from launch.spec import LaunchPlan
from tests.launch.targets import crds, golden
from tests.structure.source import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*/*.sh"))
MANIFESTS = [name for name, target in golden.cases() if target == "gke"]
VERSION = "1.32"
"""Of Kubernetes."""
EVERY_FORM = [case for case in golden.cases() if case[1] in ("gke", *golden.FORMS)]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def documents(out: Path) -> Iterator[dict]:
    for path in sorted(out.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def jobs(out: Path) -> Iterator[dict]:
    """Specifications of the jobs in all JobSets."""
    for document in documents(out):
        if document["kind"] == "JobSet":
            yield from (job["template"]["spec"] for job in document["spec"]["replicatedJobs"])


@pytest.mark.parametrize(("name", "target"), list(golden.cases()))
def test_rendered_as_kept(name: str, target: str, tmp_path: Path) -> None:
    out = tmp_path / "rendered"
    golden.render(name, target, out)
    for file in golden.KEPT[target]:
        kept = (golden.GOLDEN / name / target / file).read_text()
        made = golden.own_part(file, (out / file).read_text())
        assert made == kept, f"{file}: python -m tests.launch.targets.golden"
    plan = LaunchPlan.model_validate_json((out / "plan.json").read_text())
    assert plan.name == name
    assert not [path for path in out.iterdir() if "token" in path.name], "no token is rendered"


def test_a_plan_is_the_same_for_every_target(tmp_path: Path) -> None:
    plans = []
    for target in ("slurm", "gke"):
        out = tmp_path / target
        argv = ["render", "configs/pods/qwen3_32b_h200_64.toml", "--target", target]
        assert main([*argv, "--out", str(out), "--run", "/shared/own"]) == 0
        plans.append(json.loads((out / "plan.json").read_text()))
    assert plans[0] == plans[1] and plans[0]["run_dir"] == "/shared/own"


def test_a_shell_reads_settings_as_they_are(tmp_path: Path) -> None:
    own = "/shared/it's $HOME; own"
    argv = ["render", "configs/pods/qwen3_8b_h200_8.toml", "--target", "slurm", "--run", own]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    read = ["bash", "-c", '. "$0" && printf %s "$RUN"', tmp_path / "out" / "job.env"]
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == own


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_keep_to_what_roles_expect(name: str, tmp_path: Path) -> None:
    out = tmp_path / "rendered"
    golden.render(name, "gke", out)
    plan = LaunchPlan.model_validate_json((out / "plan.json").read_text())
    (cluster,) = [own for own in documents(out) if own["kind"] == "ClusterQueue"]
    (group,) = cluster["spec"]["resourceGroups"]
    covered = set(group["coveredResources"])
    taken = 0
    for job in jobs(out):
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["terminationGracePeriodSeconds"] >= {"trainer": 270}.get(container["name"], 60)
        assert set(container["resources"]["requests"]) <= covered
        (checked,) = pod["initContainers"]
        assert checked["args"][:3] == ["rl-jax", "preflight", "/plan/config.toml"]
        assert checked["resources"] == container["resources"]
        # A slice of several hosts answers to all of them together alone.
        together = container["name"] == "trainer" and "v" in plan.chip and len(plan.hosts) > 1
        assert ("--no-devices" in checked["args"]) == (together or container["name"] == "host")
        assert job["completions"] == job["parallelism"]
        actions = [rule["action"] for rule in job["podFailurePolicy"]["rules"]]
        assert actions == ["Ignore", "Ignore", "FailJob"]
        limits = container["resources"].get("limits", {})
        taken += sum(map(int, limits.values())) * job["completions"]
        if container["name"] == "sampler":
            assert job["completions"] == 1, "samplers in one TPU job would be slices of it"
        ports = [port["containerPort"] for port in container["ports"]]
        assert all(port < 9000 for port in ports) and len(set(ports)) == len(ports)
    assert taken == sum(host.devices for host in plan.hosts)
    (hosts,) = {
        value["value"]
        for job in jobs(out)
        for value in job["template"]["spec"]["containers"][0]["env"]
        if value["name"] == "RL_JAX_HOSTS"
    }
    assert len(hosts.split(",")) == len(plan.hosts)


@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
def test_the_queue_covers_what_is_launched(name: str, form: str, tmp_path: Path) -> None:
    golden.render(name, form, out := tmp_path / "rendered")
    found = {own["kind"]: own for own in documents(out)}
    (group,) = found["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    quota = {own["name"]: own["nominalQuota"] for own in flavor["resources"]}
    plan = LaunchPlan.model_validate_json((out / "plan.json").read_text())
    device = "nvidia.com/gpu" if plan.chip == "h200" else "google.com/tpu"
    assert quota[device] == sum(host.devices for host in plan.hosts)
    # By hand: 8 cores each of the orchestrator's pod and a head, Pathways' two take 8 and 16 more,
    # and what submits to Ray is a pod, too.
    pods = [pod for own in documents(out) for pod, _ in kueue.templates(own)]
    cores = {"pathways": 32, "rayjob": 8 + 1}.get(form, 8 * ("driver" in str(list(documents(out)))))
    assert quota.get("cpu", 0) == cores
    if form == "rayjob":
        assert quota["memory"] == (32 + 1) << 30
    for pod in pods:
        assert pod["metadata"]["labels"] == {"app.kubernetes.io/instance": name.replace("_", "-")}


def test_a_mistake_of_the_one_process_is_not_tried_again(tmp_path: Path) -> None:
    golden.render("kimi_linear_48b_v5p_128", "pathways", out := tmp_path / "rendered")
    (jobset,) = [own for own in documents(out) if own["kind"] == "JobSet"]
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    head, worker = jobs(out)
    codes = [rule.get("onExitCodes") for rule in head["podFailurePolicy"]["rules"]]
    own = {"containerName": "run", "operator": "In"}
    assert codes == [None, own | {"values": [130, 143]}, own | {"values": [2]}]
    assert "podFailurePolicy" not in worker


@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
def test_custom_resources_have_no_other_fields(name: str, form: str, tmp_path: Path) -> None:
    golden.render(name, form, out := tmp_path / "rendered")
    for document in documents(out):
        if document["apiVersion"] != "v1":
            assert crds.unknown(document) == []
    document["spec"]["replicatedJobz"] = []
    assert document["apiVersion"] == "v1" or crds.unknown(document) == ["spec.replicatedJobz"]


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed: make test-manifests",
)
@pytest.mark.parametrize(("name", "form"), EVERY_FORM)
def test_kubernetes_knows_every_field(name: str, form: str, tmp_path: Path) -> None:
    """It has no schemas of custom resources: the jobs inside them are wrapped as plain ones, and so
    are pods that are in none."""
    import kubernetes_validate

    golden.render(name, form, out := tmp_path / "rendered")
    inside = [{"template": pod} for own in documents(out) for pod, _ in kueue.templates(own)]
    found = [*jobs(out), *inside]
    assert found
    for job in found:
        wrapped = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
        kubernetes_validate.validate(wrapped, VERSION, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                wrapped | {"spec": job | {"paralellism": 1}}, VERSION, strict=True
            )
    for document in documents(out):
        if document["apiVersion"] == "v1":
            kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_bash_reads_it(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert path.read_text().count("\n") <= 150 and "<<" not in path.read_text().replace("<<<", "")


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed: make test-manifests"
)
def test_shellcheck() -> None:
    own = ["shellcheck", "--shell=bash", "--external-sources", *map(str, SCRIPTS)]
    done = subprocess.run(own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="hadolint is not installed: make test-manifests"
)
def test_hadolint() -> None:
    own = ["hadolint", LAUNCH / "container" / "Dockerfile"]
    done = subprocess.run(own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_images_are_locked_and_hold_no_root() -> None:
    text = (LAUNCH / "container" / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert "--require-hashes --requirement .requirements.lock" in text
    assert "USER 1000" in last and "tini" in last and "TOKEN" not in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--target", "tpu-vm"], 'launch.chip = "h200": --target tpu-vm needs v5p or v6e'),
        (["--target", "slurm", "--het-group"], "--het-group: needs hosts in launch.sampler"),
        (["--target", "slurm", "--set", "mesh.trainer.fsdp=16",
          "--set", "trainer.rows_per_microbatch=16"], "do not fit launch.trainer"),
        (["--target", "gke", "--set", "launch.trainer.devices=5"], "GKE has no node of 5 h200"),
        (["--target", "gke", "--run", "mine"], "--run mine: needs an absolute path"),
        (["--target", "nomad"], "invalid choice: 'nomad'"),
        (["--target", "gke", "--as", "lws"], "--as lws: needs hosts in launch.sampler"),
        (["--target", "slurm", "--as", "lws"], "--as: needs --target gke"),
        (["--target", "gke", "--as", "pathways"], "--as pathways: needs --server IMAGE, --proxy"),
        (["--target", "gke", "--as", "pathways", "--server", "s", "--proxy", "p",
          "--scratch", "gs://b"], "--as pathways: needs a slice"),
        (["--target", "gke", "--scratch", "gs://b"], "--server, --proxy, --scratch: need --as"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_one_line(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rendered"
    pod = "configs/pods/qwen3_8b_h200_8.toml"
    more = [*more, "--set", "processes.samplers=1"]
    assert main(["render", pod, "--out", str(out), *more]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(("het_group", "asked"), [(False, ["8"]), (True, ["8", "4"])])
def test_components_ask_for_their_own_gpus(
    het_group: bool, asked: list[str], tmp_path: Path
) -> None:
    golden.render("qwen3_32b_h200_64", "slurm", tmp_path / "out")
    plan = LaunchPlan.model_validate_json((tmp_path / "out" / "plan.json").read_text())
    fewer = [h.model_copy(update={"devices": 4 if h.pool == "sampler" else 8}) for h in plan.hosts]
    plan = plan.model_copy(update={"hosts": tuple(fewer)})
    job = slurm.files(plan, het_group=het_group)["job.sh"]
    assert re.findall(r"^#SBATCH --gpus-per-node=(\d+)$", job, re.MULTILINE) == asked


def test_a_directory_that_exists_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = "configs/pods/qwen3_8b_h200_8.toml"
    assert main(["render", pod, "--target", "slurm", "--out", str(tmp_path)]) == 2
    assert "exists and is left as it is" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_first_line_of_a_pod_is_a_command() -> None:
    for path in golden.PODS.glob("*.toml"):
        first = path.read_text().splitlines()[0]
        assert first.startswith(f"# rl-jax render configs/pods/{path.name} --target ")
