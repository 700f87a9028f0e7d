"""[H] A plan as manifests for GKE, and the script that applies them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from launch.gke import jobsets, lws
from launch.gke.kueue import queue
from launch.gke.pathways import Images
from launch.gke.pathways import pathways as one_process
from launch.gke.pods import CLAIM, Manifest, Pods, name_of
from launch.gke.rayjob import rayjob
from launch.sourced import sourced
from launch.spec import LaunchPlan
from rl_jax.config.base import UserError

FOLDER = Path(__file__).parent
IN_ONE_JOB = {"rayjob": "ray", "pathways": "local"}
"""Forms that start `rl-jax run` itself, with that --target, and not `rl-jax role`."""


def files(plan: LaunchPlan, form: str, image: str, pathways: Images) -> Mapping[str, str]:
    """Name -> text; `form` as --as names it. UserError where GKE has no such machines."""
    if plan.chip == "cpu":
        raise UserError('launch.chip = "cpu": --target gke needs h200, v5p or v6e')
    name = name_of(plan)
    pods = Pods(plan, image, host_names(name, plan, form))
    launched: dict[str, list[Manifest]]
    match form:
        case "rayjob":
            launched = {"rayjob.yaml": [rayjob(pods)]}
        case "pathways":
            launched = {"pathways.yaml": [one_process(pods, pathways)]}
        case "lws":
            launched = {
                "trainer.yaml": [jobsets.trainer(pods)],
                "samplers.yaml": lws.samplers(pods),
            }
        case _:
            own, theirs = jobsets.trainer(pods), jobsets.samplers(pods)
            launched = {"trainer.yaml": [own], "samplers.yaml": theirs}
    settings = {"NAME": name}
    entry = {}
    if form in IN_ONE_JOB:
        settings |= {"RUN": plan.run_dir, "TARGET": IN_ONE_JOB[form]}
        entry = {"entry.sh": (FOLDER / "entry.sh").read_text(encoding="utf-8")}
    return {
        **{name: _text(manifests) for name, manifests in launched.items()},
        "kueue.yaml": _text(queue([own for manifests in launched.values() for own in manifests])),
        "shared.yaml": _text([shared()]),
        "launch.env": sourced(settings),
        **entry,
        "start.sh": (FOLDER / "start.sh").read_text(encoding="utf-8"),
    }


def host_names(name: str, plan: LaunchPlan, form: str) -> tuple[str, ...]:
    """Of the plan's hosts inside the cluster, the trainer's first."""
    trainers, samplers = (
        sum(host.pool == pool for host in plan.hosts) for pool in ("trainer", "sampler")
    )
    if form == "lws":
        return jobsets.host_names(name, trainers, 0) + lws.host_names(name, samplers)
    return jobsets.host_names(name, trainers, samplers)


def shared() -> Manifest:
    """The disk that all pods see: snapshots, journals, logs."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "standard-rwx",
            "resources": {"requests": {"storage": "2Ti"}},
        },
    }


def _text(manifests: Sequence[Manifest]) -> str:
    """YAML documents, without aliases, keys as they were written."""
    return yaml.dump_all(manifests, Dumper=_Plain, sort_keys=False, width=100)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True
