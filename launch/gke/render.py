"""[H] A plan as manifests for GKE, and the script that applies them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from launch.gke.jobsets import host_names, samplers, trainer
from launch.gke.kueue import queue
from launch.gke.pods import CLAIM, Manifest, Pods, name_of
from launch.sourced import sourced
from launch.spec import LaunchPlan
from rl_jax.config.base import UserError

FOLDER = Path(__file__).parent


def files(plan: LaunchPlan, *, image: str) -> Mapping[str, str]:
    """Name -> text. UserError where GKE has no such machines."""
    if plan.chip == "cpu":
        raise UserError('launch.chip = "cpu": --target gke needs h200, v5p or v6e')
    counts = [sum(host.pool == pool for host in plan.hosts) for pool in ("trainer", "sampler")]
    name = name_of(plan)
    pods = Pods(plan, image, host_names(name, *counts))
    own, theirs = trainer(pods), samplers(pods)
    return {
        "trainer.yaml": _text([own]),
        "samplers.yaml": _text(theirs),
        "kueue.yaml": _text(queue([own, *theirs])),
        "shared.yaml": _text([shared()]),
        "launch.env": sourced({"NAME": name}),
        "start.sh": (FOLDER / "start.sh").read_text(encoding="utf-8"),
    }


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
