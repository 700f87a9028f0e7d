"""[H] `rl-jax`: reads and checks everything that can be wrong, then hands over to the launcher.

jax is imported after the configuration has been found good, so help and mistakes answer at once.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from launch import env
from launch.summary import report
from launch.terminal import reporter
from rl_jax.config.base import UserError
from rl_jax.config.load import load, resolved
from rl_jax.config.run import check_devices

USER_ERROR = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rl-jax",
        description="Asynchronous reinforcement learning for language-model agents, in JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rl-jax {version('rl-jax')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="train the agent that a configuration describes",
        description="Trains the agent that CONFIG describes and leaves the run's configuration, "
        "metrics, journal, snapshots, summary and picture in its directory.",
        epilog="example: rl-jax run configs/quickstart.toml --set seed=1 --out runs/seed-1",
        allow_abbrev=False,
    )
    run.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, as in configs/")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace one value, as in staleness.tau=2; may be given more than once",
    )
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory, a new one (default: runs/NAME)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake of the user's (one line on stderr), 130 interrupted."""
    try:
        given = _parser().parse_args(argv)
        return _run(given.config, given.overrides, given.out)
    except UserError as error:
        print("rl-jax:", " ".join(str(error).split()), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("rl-jax: interrupted; what the run wrote so far is kept", file=sys.stderr)
        return INTERRUPTED


def _run(config_path: Path, overrides: Sequence[str], out: Path | None) -> int:
    config = load(config_path, overrides)
    run_dir = out or Path("runs") / config.name
    _check_free(run_dir)

    env.prepare(config.devices_needed)
    check_devices(config, env.available_devices())

    from launch.local import run_local

    _create(run_dir, f"# resolved from {config_path}\n{resolved(config)}")
    display = reporter(sys.stdout)
    try:
        summary = run_local(config, run_dir, display)
    except UserError:
        _discard_unused(run_dir)
        raise
    finally:
        display.close()
    print("\n".join([*report(summary), f"written to {run_dir}"]))
    return 0


def _check_free(run_dir: Path) -> None:
    if run_dir.exists() or run_dir.is_symlink():
        raise UserError(
            f"{run_dir} exists and is left as it is: choose another with --out {run_dir}-2, "
            "or remove it"
        )


def _create(run_dir: Path, config_text: str) -> None:
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text(config_text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{run_dir}: cannot be created ({error.strerror}): choose another with --out DIR"
        ) from None


def _discard_unused(run_dir: Path) -> None:
    """Removes a run directory that holds its configuration only, so its name can be used again."""
    if [path.name for path in run_dir.iterdir()] == ["config.toml"]:
        (run_dir / "config.toml").unlink()
        run_dir.rmdir()


if __name__ == "__main__":
    sys.exit(main())
