"""What `rl-jax render` writes: as it was, readable by who reads it, and complete."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.spec import LaunchPlan
from tests.launch.targets import golden
from tests.structure.source import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*/*.sh"))
MANIFESTS = [name for name, target in golden.cases() if target == "gke"]


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


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed",
)
@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_knows_every_field(name: str, tmp_path: Path) -> None:
    """It has no schemas of custom resources: the jobs inside them are wrapped as plain ones."""
    import kubernetes_validate

    golden.render(name, "gke", out := tmp_path / "rendered")
    found = 0
    for job in jobs(out):
        wrapped = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
        kubernetes_validate.validate(wrapped, "1.32", strict=True)
        found += 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(
                wrapped | {"spec": job | {"paralellism": 1}}, "1.32", strict=True
            )
    assert found
    for document in documents(out):
        if document["apiVersion"] == "v1":
            kubernetes_validate.validate(document, "1.32", strict=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_bash_reads_it(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert path.read_text().count("\n") <= 150 and "<<" not in path.read_text().replace("<<<", "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    own = ["shellcheck", "--shell=bash", "--external-sources", *map(str, SCRIPTS)]
    done = subprocess.run(own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint() -> None:
    own = ["hadolint", LAUNCH / "container" / "Dockerfile"]
    done = subprocess.run(own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_images_are_locked_and_hold_no_root() -> None:
    text = (LAUNCH / "container" / "Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert "--require-hashes --requirement .requirements.lock" in text
    assert "USER 1000" in last and "tini" in last and "TOKEN" not in text


def readme_commands() -> list[str]:
    """Lines that begin with rl-jax render in the README's blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (LAUNCH / "README.md").read_text(), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("rl-jax render")]


@pytest.mark.parametrize("command", readme_commands())
def test_commands_of_the_readme_render(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    words[words.index("--out") + 1] = str(tmp_path / "rendered")
    assert main(words) == 0


def test_every_target_is_in_the_readme() -> None:
    targets = {shlex.split(command)[shlex.split(command).index("--target") + 1]
               for command in readme_commands()}  # fmt: skip
    assert targets == {"slurm", "gke", "tpu-vm"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--target", "tpu-vm"], 'launch.chip = "h200": --target tpu-vm needs v5p or v6e'),
        (["--target", "slurm", "--het-group"], "--het-group: needs --target slurm and hosts"),
        (["--target", "slurm", "--set", "mesh.trainer.fsdp=16",
          "--set", "trainer.rows_per_microbatch=16"], "do not fit launch.trainer"),
        (["--target", "gke", "--set", "launch.trainer.devices=5"], "GKE has no node of 5 h200"),
        (["--target", "nomad"], "invalid choice: 'nomad'"),
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
