"""[H] `rl-jax run --target`: renders a launch, starts it, says how to look and to stop."""

import argparse
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from launch import render
from launch.operate.launched import called
from launch.operate.place import STARTED, find
from launch.operate.running import of_process, recorded
from launch.operate.status import commands
from launch.ray import cluster
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig

TARGETS = ("local", "ray", *render.TARGETS)
NEEDED = {"slurm": ("sbatch",), "gke": ("kubectl",), "tpu-vm": ("gcloud", "bash")}
"""Programs that a launch is started with."""
SETTINGS = ("PROJECT", "ZONE", "SHARE")
"""Of the environment, for TPU VMs."""
START_S = 600.0
"""Deadline of who only submits."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line of `rl-jax run`."""
    parser.add_argument("--target", choices=TARGETS, default="local",
                        help="where: this machine (default), a cluster of Ray, or what `render` "
                        "writes for")  # fmt: skip
    _address(parser)
    render.add_target_options(parser)


def add_resume_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line of `rl-jax resume`; a rendered launch goes on by its own start."""
    parser.add_argument("--target", choices=TARGETS[:2], default="local",
                        help="where: this machine (default) or a cluster of Ray")  # fmt: skip
    _address(parser)


def _address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", metavar="ADDRESS", help="ray: of the cluster (default: found)")


def check_place(given: argparse.Namespace) -> None:
    """UserError for an option that the target has no use for."""
    if given.address is not None and given.target != "ray":
        raise UserError(f"--address: needs --target ray, not {given.target}")
    if given.target == "ray" and given.roles != "local":
        raise UserError("--roles: with --target ray every role is a process: leave it out")


Begin = Callable[[RunConfig, Path, argparse.Namespace], int]
"""Runs a configuration to its end, from wherever the record in the run's directory is."""


def on_ray() -> Begin:
    """UserError where Ray is not installed, or its cluster would let anybody in."""
    cluster.prepare()
    from launch.ray.run import run

    def begin(config: RunConfig, run_dir: Path, given: argparse.Namespace) -> int:
        given.address = given.address or "auto"
        with recorded(run_dir, scattered=True):
            return run(config, run_dir, given)

    return begin


def rendered(given: argparse.Namespace) -> int:
    """Writes the launch into --out, starts it. UserError, with nothing started, for a mistake."""
    target = given.target
    check_place(given)
    render.check_options(given)
    if given.out is None:
        raise UserError(f"--target {target}: needs --out DIR, a new directory for the launch")
    if given.roles != "local":
        raise UserError(f"--roles: with --target {target} every role is a process: leave it out")
    for program in NEEDED[target]:
        if shutil.which(program) is None:
            raise UserError(f"--target {target}: no {program} here; `rl-jax render` writes the "
                            "launch, to be started where there is one")  # fmt: skip
    if target == "tpu-vm" and (missing := [own for own in SETTINGS if not os.environ.get(own)]):
        raise UserError(f"--target tpu-vm: {', '.join(missing)} must be set in the environment")
    render.run(given)
    out: Path = given.out
    match target:
        case "slurm":
            started = {"job": _submitted(out)}
            said = f"job {started['job']}"
        case "gke":
            _called_there(out, "./start.sh")
            started, said = {}, "its manifests are applied"
        case _:
            started = _kept_going(out)
            said = f"babysit.sh is pid {started['pid']}, and prints to {out / 'babysit.log'}"
    (out / STARTED).write_text(json.dumps({"target": target, **started}) + "\n", encoding="utf-8")
    print(f"started: {said}")
    more = [f"rl-jax status {out}", f"rl-jax logs {out} --follow", *commands(find(out))]
    print("\n".join([*(f"look: {command}" for command in more), f"stop: rl-jax stop {out}"]))
    return 0


def _submitted(out: Path) -> str:
    said = _called_there(out, "sbatch", "job.sh")
    if (found := re.search(r"Submitted batch job (\d+)", said)) is None:
        raise UserError(f"sbatch did not tell a job's number: {said.strip()}")
    return found[1]


def _called_there(out: Path, *argv: str) -> str:
    try:
        return called(*argv, wait_s=START_S, where=out)
    except UserError as error:
        raise UserError(f"{error}; {out} is kept: cd {out} && {' '.join(argv)}") from None


def _kept_going(out: Path) -> dict[str, object]:
    """babysit.sh in a session of its own: it outlives this process and its terminal."""
    with (out / "babysit.log").open("ab") as log:
        process = subprocess.Popen(
            ["./babysit.sh"], cwd=out, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return {**of_process(process.pid)._asdict()}
