"""[H] `rl-jax`: reads and checks everything that can be wrong, then hands over to the launcher.

jax is imported after the configuration has been found good, so help and mistakes answer at once.
"""

import argparse
import errno
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from launch import env, preflight, render, role, start
from launch.code import changed_packages, check_teachers, config_of, located
from launch.commands import COMMANDS
from launch.operate import logs, running, status, stop, watch
from launch.plan.command import add_options as plan_options
from launch.plan.command import run as plan
from launch.stop import Stopped
from launch.terminal import reporter
from rl_jax.config.base import UserError, toml_value
from rl_jax.config.load import load, resolved
from rl_jax.config.run import RunConfig, check_devices
from rl_jax.wire.client import HandshakeRefused

DIFFERENT = 1
USER_ERROR = 2
INTERRUPTED = 128 + signal.SIGINT
DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS})
"""What is wrong with a disk and not with the program."""
OPERATING = {"status": status, "logs": logs, "watch": watch, "stop": stop}
NEW_RUN = frozenset({"config.toml", "FORMAT", "code"})
"""What a run's directory holds before anything ran."""


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
    own = {
        name: commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=f"example: rl-jax {name} {example}",
            allow_abbrev=False,
        )
        for name, (summary, description, example) in COMMANDS.items()
    }
    own["run"].add_argument("config", type=Path, metavar="CONFIG", help="TOML file, as in configs/")
    own["run"].add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace one value, as in staleness.tau=2; may be given more than once",
    )
    own["run"].add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="run directory, a new one (default: runs/NAME); with a cluster's --target the "
        "directory to write the launch into",
    )
    for name in ("resume", "replay", "report", "show", "events"):
        _of_run(own[name])
    for name in ("run", "resume"):
        _roles(own[name])
    own["report"].add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    own["show"].add_argument(
        "trajectory", metavar="TRAJECTORY", help="task/prompt/sample[/attempt]"
    )
    plan_options(own["plan"])
    start.add_options(own["run"])
    start.add_resume_options(own["resume"])
    for name, command in OPERATING.items():
        command.add_options(own[name])
    render.add_options(own["render"])
    preflight.add_options(own["preflight"])
    role.add_options(own["role"])
    _of_checkpoints(own["import"], own["export"])
    own["list"].add_argument(
        "directory", type=Path, metavar="DIR", nargs="?", default=Path("runs"), help="default: runs"
    )
    return parser


def _of_checkpoints(taking: argparse.ArgumentParser, writing: argparse.ArgumentParser) -> None:
    taking.add_argument("source", type=Path, metavar="SOURCE", help="directory or GGUF file")
    taking.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "as-is"),
        default="float32",
        help="of the parameters; as-is keeps each tensor's own (default: float32)",
    )
    writing.add_argument(
        "snapshot", type=Path, metavar="SNAPSHOT", help="a version, as runs/NAME/snapshots/12"
    )
    writing.add_argument(
        "--max-shard-size",
        type=_size,
        metavar="SIZE",
        help="cut into files of at most SIZE, as 5GB or 500MB (default: the files it came in)",
    )
    for parser in (taking, writing):
        parser.add_argument(
            "--out", type=Path, metavar="DIR", required=True, help="a new directory"
        )


def _size(text: str) -> int:
    """Bytes of "5GB"; powers of ten, as Hugging Face counts them."""
    found = re.fullmatch(r"([1-9]\d*)(KB|MB|GB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number and KB, MB or GB, as 5GB")
    return int(found[1]) * 1000 ** (1 + ("KB", "MB", "GB").index(found[2]))


def _of_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, as runs/quickstart")


def _roles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--roles",
        choices=("local", "processes"),
        default="local",
        help="all programs in this process, or each in one of its own (default: local)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a replay differs, 2 a mistake of the user's (one line on stderr),
    128 + signal where one ended the run."""

    def act() -> int:
        given = _parser().parse_args(argv)
        return _ACTIONS[given.command](given)

    return guarded(act)


def guarded(act: Callable[[], int]) -> int:
    """The exit status of `act`, what a user may have caused told in one line on stderr."""
    try:
        return act()
    except (UserError, HandshakeRefused) as error:
        print("rl-jax:", " ".join(str(error).split()), file=sys.stderr)
        return USER_ERROR
    except Stopped as stopped:
        print(f"rl-jax: {stopped}", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print("rl-jax: interrupted; what a run wrote so far is kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has had enough.
        sys.stdout = None
        return 0
    except OSError as error:
        if errno_of(error) not in DISK:
            raise
        print("rl-jax:", " ".join(str(error).split()), file=sys.stderr)
        return USER_ERROR


def errno_of(error: BaseException) -> int | None:
    """Of an OSError, or of the one it was raised from."""
    own = getattr(error, "errno", None)
    return own or (errno_of(error.__cause__) if error.__cause__ else None)


def entry() -> NoReturn:
    """The console script."""
    leave(main())


def leave(status: int) -> NoReturn:
    """Ends the process without waiting for a compilation that a stop left running."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def _run(given: argparse.Namespace) -> int:
    if given.target not in ("local", "ray"):
        return start.rendered(given)
    start.check_place(given)
    render.check_options(given)
    config = load(given.config, given.overrides)
    run_dir = given.out or Path("runs") / config.name
    _check_free(run_dir)
    begin = _beginning(config, given)
    from launch.compose import with_defaults
    from launch.run_directory import create_run

    config = located(with_defaults(config))
    create_run(run_dir, config, f"# resolved from {given.config}\n{resolved(config)}")
    try:
        return begin(config, run_dir, given)
    except BaseException as error:
        if _discard_unused(run_dir) and isinstance(error, Stopped):
            raise error.before_it_began() from None
        raise


def _resume(given: argparse.Namespace) -> int:
    start.check_place(given)
    config = config_of(given.run)
    begin = _beginning(config, given)

    from launch.resume import check_resumable, is_finished

    check_resumable(given.run)
    if is_finished(given.run):
        return _finish(config, given.run)
    check_teachers(config, given.run)
    return begin(config, given.run, given)


def _beginning(config: RunConfig, given: argparse.Namespace) -> start.Begin:
    """What runs it where it is to run, which is found good first."""
    if given.target == "ray":
        return start.on_ray()
    _prepare(config, given.roles)
    return _begin


def _prepare(config: RunConfig, roles: str = "local") -> None:
    """Processes look for their devices themselves: here they would be taken from them."""
    if roles == "local":
        env.prepare(config.devices_needed)
        return check_devices(config, env.available_devices())

    from launch.processes import check_ports

    check_ports(config)


def _begin(config: RunConfig, run_dir: Path, given: argparse.Namespace) -> int:
    """Runs on this machine to the end from wherever the record is."""
    from launch.local import run_local
    from launch.processes import run_processes
    from launch.report.data import seconds_on_record

    display = reporter(sys.stdout)
    began = time.time() - seconds_on_record(run_dir)
    run = run_local if given.roles == "local" else run_processes
    with running.recorded(run_dir):
        try:
            run(config, run_dir, display, began=began)
        finally:
            display.close()
        return _finish(config, run_dir)


def _finish(config: RunConfig, run_dir: Path) -> int:
    from launch.finish import finish
    from launch.summary import report

    summary = finish(config, run_dir)
    print("\n".join([*report(summary), f"written to {run_dir}: report.html shows it"]))
    return 0


def _replay(given: argparse.Namespace) -> int:
    config = config_of(given.run)
    check_teachers(config, given.run)
    _prepare(config)

    from launch.replay import read_recording, replay, report

    recording = read_recording(given.run)
    display = reporter(sys.stdout)
    try:
        done = replay(config, given.run, display, recording)
    finally:
        display.close()
    print("\n".join(report(given.run, done)))
    if changed := changed_packages(given.run):
        print(f"code that changed since the run: {', '.join(changed[:5])}, {len(changed)} files")
    return DIFFERENT if done.first_difference else 0


def _check_free(run_dir: Path) -> None:
    if run_dir.exists() or run_dir.is_symlink():
        raise UserError(
            f"{run_dir} exists and is left as it is: choose another with --out {run_dir}-2, "
            f"remove it, or go on with it by `rl-jax resume {run_dir}`"
        )


def _discard_unused(run_dir: Path) -> bool:
    """Removes a run directory in which nothing ran, so its name can be used again."""
    unused = {path.name for path in run_dir.iterdir()} <= NEW_RUN
    if unused:
        shutil.rmtree(run_dir)
    return unused


def _report(given: argparse.Namespace) -> int:
    from launch.finish import report

    print(f"written to {report(config_of(given.run), given.run, given.out)}")
    return 0


def _show(given: argparse.Namespace) -> int:
    from launch import build
    from launch.finish import decoder
    from launch.listing import show

    family = build.build_task(config_of(given.run))
    show(given.run, given.trajectory, decoder(family), sys.stdout)
    return 0


def _events(given: argparse.Namespace) -> int:
    from launch.listing import print_events

    config_of(given.run)
    print_events(given.run, sys.stdout)
    return 0


def _import(given: argparse.Namespace) -> int:
    from launch.importing import MODEL, VERSION, import_checkpoint
    from models.checkpoint.source import TOKENIZER

    display = reporter(sys.stderr)
    try:
        import_checkpoint(given.source, given.out, given.dtype, display)
    finally:
        display.close()
    print(
        f"written to {given.out}: begin a run with the section of {given.out / MODEL},\n"
        f"warm_start.snapshot = {toml_value(str(given.out / str(VERSION)))} and "
        f"task.tokenizer = {toml_value(str(given.out))}"
        if (given.out / TOKENIZER).is_file()
        else f"written to {given.out}: no {TOKENIZER}: a run needs one in task.tokenizer; its "
        f"section [model] is {given.out / MODEL},\n"
        f"warm_start.snapshot = {toml_value(str(given.out / str(VERSION)))}"
    )
    return 0


def _export(given: argparse.Namespace) -> int:
    from launch.exporting import export_snapshot

    display = reporter(sys.stderr)
    try:
        export_snapshot(given.snapshot, given.out, given.max_shard_size, display)
    finally:
        display.close()
    print(f"written to {given.out}")
    return 0


def _list(given: argparse.Namespace) -> int:
    from launch.listing import list_runs

    list_runs(given.directory, sys.stdout)
    return 0


_ACTIONS = {
    "run": _run,
    "resume": _resume,
    "replay": _replay,
    "report": _report,
    "show": _show,
    "events": _events,
    "import": _import,
    "export": _export,
    "list": _list,
    "plan": plan,
    "render": render.run,
    "preflight": preflight.run,
    "role": role.run,
    **{name: command.run for name, command in OPERATING.items()},
}


if __name__ == "__main__":
    entry()
