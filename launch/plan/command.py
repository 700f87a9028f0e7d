"""[H] `rl-jax plan`: reads a configuration and prints what its programs take of a device."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.config.run import MeshShape, RunConfig, TrainerMesh

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
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="a file of configs/, or the path of one"
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
    parser.add_argument("--chip", metavar="NAME", help="say whether it fits: v5p, v6e or h200")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(given: argparse.Namespace) -> int:
    """Prints the plan. UserError for what is wrong with the options."""
    own = list(_overrides(given))
    options = {key: option for option, key, _ in own}
    texts = [f"{key}={value}" for _, key, value in own]
    config = load(_file(given.model), [*texts, *given.overrides], options=options)

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
    model, plain = (build.build_policy(own, vocabulary) for own in (config, _all_kept(config)))
    check_experts(config, model)
    try:
        programs = plan_trainer(config, model, plain), plan_sampler(config, model)
    except ValueError as error:
        raise UserError(str(error)) from error
    print((to_json if given.json else to_text)(programs, given.chip))
    return 0


def _all_kept(config: RunConfig) -> RunConfig:
    """The same without recomputation."""
    return config.model_copy(update={"model": config.model.model_copy(update={"remat": "none"})})


def _file(name: str) -> Path:
    known = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise UserError(f"--model {name}: no such model; there is {', '.join(known)}, or a path")
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
