"""[H] `rl-jax render`: a launch as files, for one target; starts nothing."""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from launch.code import carried, directories, located
from launch.env_table import resolve
from launch.spec import PLATFORMS, LaunchPlan, RunSpec, make_plan, one_process_plan
from rl_jax.config.base import UserError, toml_value
from rl_jax.config.load import load, resolved
from rl_jax.config.run import RunConfig

TARGETS = ("slurm", "gke", "tpu-vm")
FORMS = ("jobset", "lws", "rayjob", "pathways")
IMAGE = "rl-jax"
SHARED = {"slurm": "run", "gke": "/shared/{name}", "tpu-vm": "/shared/{name}"}
"""A run's directory where none is given; a relative one is below the rendered directory."""
BESIDE = {"gke": "/plan/", "tpu-vm": ""}
"""Targets whose hosts do not see this disk, and what they write before the name of a file that lies
beside the plan there."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, as in configs/pods")
    parser.add_argument("--target", required=True, choices=TARGETS, help="what starts the run")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where to write, a new directory"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace one value, as in launch.first_port=7000",
    )  # fmt: skip
    add_target_options(parser)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of a launch on a cluster."""
    parser.add_argument(
        "--run", metavar="RUN", help="the run's directory as all hosts see it (slurm: DIR/run)"
    )
    parser.add_argument("--image", metavar="IMAGE", help=f"gke: of our containers ({IMAGE})")
    parser.add_argument(
        "--as", choices=FORMS, dest="form",
        help=f"gke: JobSets (default: {FORMS[0]}), LeaderWorkerSets for samplers, a RayJob, or the "
        "one-process mode on Pathways",
    )  # fmt: skip
    for name, what in (("server", "image of workers and manager"), ("proxy", "image of the proxy")):
        parser.add_argument(f"--{name}", metavar="IMAGE", help=f"pathways: {what}")
    parser.add_argument(
        "--scratch", metavar="URL", help="pathways: gs://BUCKET/DIR that is its own"
    )
    parser.add_argument(
        "--het-group", action="store_true", help="slurm: a component each for trainer and samplers"
    )


def check_options(given: argparse.Namespace) -> None:
    """UserError for an option that the target has no use for."""
    clusters = ", ".join(TARGETS)
    pathways = given.server or given.proxy or given.scratch
    if pathways and given.form != "pathways":
        raise UserError("--server, --proxy, --scratch: need --as pathways")
    if given.form == "pathways" and not (given.server and given.proxy and given.scratch):
        raise UserError("--as pathways: needs --server IMAGE, --proxy IMAGE and --scratch URL")
    for name, wanted in (
        ("run", TARGETS),
        ("image", ("gke",)),
        ("form", ("gke",)),
        ("het_group", ("slurm",)),
    ):
        if getattr(given, name) and given.target not in wanted:
            needed = clusters if wanted == TARGETS else wanted[0]
            option = {"form": "as"}.get(name, name.replace("_", "-"))
            raise UserError(f"--{option}: needs --target {needed}")


def run(given: argparse.Namespace) -> int:
    """Writes everything. UserError for a plan that does not fit, and where DIR exists."""
    check_options(given)
    config = load(given.config, given.overrides)
    _check(config, given)
    run_dir = given.run or SHARED[given.target].format(name=config.name)
    planned = one_process_plan if given.form == "pathways" else make_plan
    plan = planned(RunSpec(config, run_dir))
    from launch.compose import with_defaults  # checks the loss, which takes jax

    config = with_defaults(config)
    copies: dict[Path, str] = {}
    if given.target in BESIDE:
        config, copies = carried(config, BESIDE[given.target])
    else:
        config = located(config)
    text = f"# resolved from {given.config}\n{resolved(config)}"
    written = {**common(config, plan, text), **target_files(plan, given)}
    if given.form == "pathways":
        del written["environment.md"]  # no role is placed by the plan
    try:
        given.out.mkdir(parents=True)
        for name, content in written.items():
            path = given.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
        for file, name in copies.items():
            shutil.copyfile(file, given.out / name)
    except OSError as error:
        raise UserError(f"{given.out}: cannot be written ({error.strerror})") from None
    print(f"written to {given.out}: {', '.join([*written, *copies.values()])}")
    return 0


def _check(config: RunConfig, given: argparse.Namespace) -> None:
    if given.out.exists() or given.out.is_symlink():
        raise UserError(f"{given.out} exists and is left as it is: choose another with --out")
    tpu = PLATFORMS[config.launch.chip] == "tpu"
    if given.target == "tpu-vm" and not tpu:
        raise UserError(f'launch.chip = "{config.launch.chip}": --target tpu-vm needs v5p or v6e')
    if given.target == "slurm" and tpu:
        raise UserError(f'launch.chip = "{config.launch.chip}": --target slurm needs h200 or cpu')
    if given.het_group and config.launch.sampler is None:
        raise UserError("--het-group: needs hosts in launch.sampler")
    if given.target == "gke" and given.run and not Path(given.run).is_absolute():
        raise UserError(f"--run {given.run}: needs an absolute path, as all pods of GKE find it")
    for key, where in directories(config).items():
        if given.target in BESIDE and not Path(where).is_absolute():
            raise UserError(
                f"{key} = {toml_value(where)}: the hosts of --target {given.target} do not see "
                f"this disk: needs the absolute path at which they find it, as /shared/{where}"
            )


def common(config: RunConfig, plan: LaunchPlan, text: str) -> Mapping[str, str]:
    """What every target gets: the configuration, the plan, and the environment with its reasons."""
    return {
        "config.toml": text,
        "plan.json": json.dumps(plan.model_dump(mode="json"), indent=1) + "\n",
        "environment.md": environment(config, plan),
    }


def environment(config: RunConfig, plan: LaunchPlan) -> str:
    """The resolved table, one part for each kind of role, as Markdown."""
    platform = PLATFORMS[plan.chip]
    parts = [
        "# Environment\n\nWhat is set already where a process starts wins, flag by flag; only what "
        "says where a role stands\n(JAX_PLATFORMS, CUDA_VISIBLE_DEVICES) is the plan's."
    ]
    for kind in ("trainer", "sampler", "host"):
        roles = ", ".join(group.name for group in plan.groups if group.kind == kind)
        if not roles:
            continue
        lines = [
            f"| `{own.name}` | `{own.value}` | {own.reason} | {own.source} |"
            for own in resolve(platform, kind, config.launch.env, plan.run_dir)
        ]
        head = ["| name | value | reason | source |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([f"## {roles}\n", *head, *lines]))
    return "\n\n".join(parts) + "\n"


def target_files(plan: LaunchPlan, given: argparse.Namespace) -> Mapping[str, str]:
    """Scripts or manifests."""
    match given.target:
        case "slurm":
            from launch.slurm.render import files

            return files(plan, het_group=given.het_group)
        case "gke":
            from launch.gke.pathways import Images
            from launch.gke.render import files

            own = Images(given.server, given.proxy, given.scratch)
            return files(plan, given.form or FORMS[0], given.image or IMAGE, own)
        case _:
            from launch.tpu_vm.render import files

            return files(plan)
