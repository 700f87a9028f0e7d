"""[H] `rl-jax plan`: reads a configuration and prints what its programs take of a device."""

import argparse
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.picture import can_draw
from launch.plan.inputs import checked, with_assumptions
from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.config.run import MeshShape, TrainerMesh

CONFIGS = Path(__file__).parents[2] / "configs"
_SETS = {
    "rows": "trainer.rows_per_microbatch",
    "length": "trainer.row_length",
    "remat": "model.remat",
    "param_dtype": "trainer.param_dtype",
}
"""Option -> the key that it replaces."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "config", nargs="?", metavar="CONFIG", help="bytes and forecast: a file, or one of configs/"
    )
    what.add_argument("--model", metavar="NAME", help="bytes alone: as CONFIG")
    what.add_argument(
        "--fit", type=Path, metavar="RUN", help="measure the rates of a run and compare a forecast"
    )
    for program, axes in (("mesh", "data=8,fsdp=4,tensor=2"), ("sampler", "data=4,tensor=2")):
        whose = "the trainer's" if program == "mesh" else "the sampler's"
        parser.add_argument(
            f"--{program}",
            metavar="AXES",
            help=f"{whose} mesh, as {axes}; axes not named are 1 (default: the file's)",
        )
    parser.add_argument("--rows", metavar="N", help="rows of a microbatch")
    parser.add_argument("--length", metavar="L", help="tokens of a row")
    parser.add_argument("--remat", metavar="POLICY", help="none, block or dots")
    parser.add_argument("--param-dtype", metavar="DTYPE", help="float32 or bfloat16")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="replace another value of the file, as in sampler.sessions=64",
    )  # fmt: skip
    parser.add_argument(
        "--chip", metavar="NAME", help="v5p, v6e or h200: whether it fits, and rates"
    )
    parser.add_argument("--rates", type=Path, metavar="FILE", help="rates that --fit saved")
    parser.add_argument("--save", type=Path, metavar="FILE", help="of --fit: write the rates there")
    parser.add_argument(
        "--assume", action="append", default=[], metavar="KEY=NUMBER", dest="assumed",
        help="replace a rate, as in rollout.sampled_tokens=4000",
    )  # fmt: skip
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the forecast, as PNG")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(given: argparse.Namespace) -> int:
    """Prints the plan. UserError for what is wrong with the options."""
    _check_forecast(given)
    if given.fit is not None:
        from launch.plan.predict import fitted

        fitted(given)
        return 0
    table = _read(given.rates) if given.rates is not None else None
    with_assumptions(table or {}, given.assumed)
    own = list(_overrides(given))
    options = {key: option for option, key, _ in own}
    texts = [f"{key}={value}" for _, key, value in own]
    config = load(_file(given), [*texts, *given.overrides], options=options)

    # jax is imported after the options have been found good.
    from launch import build
    from launch.needs import check_experts
    from launch.plan.base import CHIPS
    from launch.plan.sampler import plan_sampler
    from launch.plan.table import to_json, to_text
    from launch.plan.trainer import plan_trainer

    if given.chip is not None and given.chip not in CHIPS:
        raise UserError(f"--chip {given.chip}: there is {', '.join(CHIPS)}")
    vocabulary = config.model.vocab_size
    if vocabulary is None:
        vocabulary = build.build_renderer(build.build_task(config)).vocab_size
    model = build.build_policy(config, vocabulary)
    check_experts(config, model)
    try:
        programs = plan_trainer(config, model), plan_sampler(config, model)
    except ValueError as error:
        raise UserError(str(error)) from error
    if given.config is None:
        print((to_json if given.json else to_text)(programs, given.chip))
        return 0

    from launch.plan.predict import forecast

    if not given.json:
        print(to_text(programs, given.chip))
    told = forecast(given, table, config, model)
    if given.json:
        print(json.dumps({**json.loads(to_json(programs, given.chip)), "forecast": told}, indent=1))
    return 0


def _check_forecast(given: argparse.Namespace) -> None:
    """UserError for options that say nothing of what is asked for."""
    if given.save is not None and given.fit is None:
        raise UserError("--save: needs --fit RUN, whose rates it writes")
    asked = {"--rates": given.rates, "--assume": given.assumed, "--picture": given.picture}
    for option, value in asked.items():
        if value and given.model is not None:
            raise UserError(
                f"{option}: needs CONFIG instead of --model, which is about bytes alone"
            )
    for option, path in (("--save", given.save), ("--picture", given.picture)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"{option} {path}: needs a file in a directory that there is")
    if given.picture is not None and not can_draw():
        raise UserError("--picture needs matplotlib: install rl-jax[report]")
    if given.config is not None and given.rates is None and given.chip is None:
        raise UserError(
            "a forecast needs rates: --chip NAME, or --rates FILE, as `rl-jax plan --fit RUN "
            "--save FILE` writes it"
        )
    for option, value in (("--rates", given.rates), ("--set", given.overrides)):
        if value and given.fit is not None:
            raise UserError(f"{option}: says nothing of a run that was; leave it out with --fit")


def _read(path: Path) -> dict[str, Any]:
    """The table of a rates file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    checked(str(path), table)
    return table


def _file(given: argparse.Namespace) -> Path:
    option, name = ("", given.config) if given.config else ("--model ", given.model)
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise UserError(f"{option}{name}: no such model; there is {', '.join(known)}, or a path")
    return Path(name)


def _overrides(given: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(option as it was given, key, value) of all that the options replace."""
    for option, shape, section in (
        ("mesh", TrainerMesh, "mesh.trainer"),
        ("sampler", MeshShape, "mesh.sampler"),
    ):
        if (told := getattr(given, option)) is not None:
            sizes = _sizes(f"--{option}", told, tuple(shape.model_fields))
            yield from ((f"--{option} {told}", f"{section}.{axis}", n) for axis, n in sizes.items())
    for option, key in _SETS.items():
        if (told := getattr(given, option)) is not None:
            yield f"--{option.replace('_', '-')} {told}", key, told


def _sizes(option: str, told: str, axes: tuple[str, ...]) -> dict[str, str]:
    """Of all axes of a mesh: 1 for those that are not told."""
    sizes = dict.fromkeys(axes, "1")
    for part in told.split(","):
        axis, equals, size = part.partition("=")
        if not equals or not size.isdecimal():
            raise UserError(f"{option} {part}: needs AXIS=SIZE, as in data=8,tensor=2")
        if axis not in axes:
            raise UserError(f"{option} {part}: unknown axis; there is {', '.join(axes)}")
        sizes[axis] = size
    return sizes
