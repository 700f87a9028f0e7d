"""[H] A plan as a Slurm job: the scripts of this folder under a header of #SBATCH lines."""

from collections.abc import Mapping
from pathlib import Path

from launch.sourced import sourced
from launch.spec import LaunchPlan

FOLDER = Path(__file__).parent
NOTICE_S = 300
"""Seconds before its end in which a job is told of it; a trainer's grace is less."""


def files(plan: LaunchPlan, *, het_group: bool) -> Mapping[str, str]:
    """Name -> text. With `het_group` trainer and samplers are components of their own."""
    counts = {
        pool: sum(host.pool == pool for host in plan.hosts) for pool in ("trainer", "sampler")
    }
    restarts = plan.group("trainer").restarts
    settings = {
        "TRAINER_HOSTS": counts["trainer"],
        "SAMPLER_HOSTS": counts["sampler"],
        "HET_GROUP": int(het_group),
        "MAX_RESTARTS": restarts,
        "RUN": plan.run_dir,
    }
    return {
        "job.sh": "\n".join(_header(plan, counts, het_group)) + "\n" + _text("job.sh"),
        "node.sh": _text("node.sh"),
        "job.env": sourced(settings),
    }


def _header(plan: LaunchPlan, counts: Mapping[str, int], het_group: bool) -> list[str]:
    common = [
        f"--job-name={plan.name}",
        f"--signal=B:USR1@{NOTICE_S}",
        "--requeue",
        "--open-mode=append",
        "--output=job-%j.log",
    ]
    pools = [counts["trainer"], counts["sampler"]] if het_group else [sum(counts.values())]
    # Of a single component every node has as many as the host that asks for most.
    first = [0, counts["trainer"]] if het_group else [0]
    gpus = [
        max(h.devices for h in plan.hosts[at : at + n]) for at, n in zip(first, pools, strict=True)
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in common)]
    for index, nodes in enumerate(pools):
        lines += ["#SBATCH hetjob"] if index else []
        lines += [f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive"]
        lines += [f"#SBATCH --gpus-per-node={gpus[index]}"] if plan.chip == "h200" else []
    return lines


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
