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

from launch import env, preflight, render, role
from launch.code import changed_packages, check_teachers, config_of, located
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
NEW_RUN = frozenset({"config.toml", "FORMAT", "code"})
"""What a run's directory holds before anything ran."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


_COMMANDS = {
    "run": (
        "train the agent that a configuration describes",
        "Trains the agent that CONFIG describes and leaves the run's whole record in its "
        "directory. Ctrl-C or SIGTERM stops it with a checkpoint.",
        "configs/quickstart.toml --set seed=1 --out runs/seed-1",
    ),
    "resume": (
        "go on with a run that was stopped or killed",
        "Goes on where RUN's last checkpoint and its journal end; no prompt is repeated or "
        "skipped.",
        "runs/quickstart",
    ),
    "replay": (
        "rebuild every update of a run and compare digests",
        "Rebuilds every update of RUN from version 0 and the record alone and compares every "
        "published version: bit for bit on a machine with the same numerics. Exit status 1 where "
        "they differ.",
        "runs/quickstart",
    ),
    "report": (
        "write a run's report.html",
        "Writes one self-contained page about RUN, which may still be going on.",
        "runs/quickstart",
    ),
    "show": (
        "print one trajectory turn by turn",
        "Prints a trajectory of RUN turn by turn: text, token ids, versions, log-probabilities.",
        "runs/quickstart lookup/12/3",
    ),
    "events": (
        "print a run's journal as JSON lines",
        "Prints the events of all programs of RUN in the run's order.",
        "runs/quickstart | head",
    ),
    "import": (
        "take in a checkpoint of Hugging Face's or a GGUF file",
        "Makes of SOURCE, a Hugging Face directory or a GGUF file of architecture llama with "
        "byte-level BPE, a version that a run can start from: DIR/0 is for warm_start.snapshot, "
        "DIR/model.toml holds the section [model], DIR is for task.tokenizer. Killed, it goes on "
        "where it stopped when called again.",
        "SmolLM2-135M-Instruct --out checkpoints/smollm2",
    ),
    "export": (
        "write a version as a Hugging Face directory",
        "Writes SNAPSHOT, a version that came from an import or from a run that began with one, as "
        "a Hugging Face directory. Killed, it goes on where it stopped when called again.",
        "runs/smollm2/snapshots/12 --out exported",
    ),
    "list": ("list runs", "Lists the runs in DIR with their state.", "runs"),
    "plan": (
        "say what a run will take and give: bytes, speed, idle shares, lag",
        "Prints what trainer and sampler of a configuration hold on one device of their meshes: "
        "parameters, optimizer and caches are exact, what has a ~ is estimated. Then, from rates "
        "of a chip or a fitted run, what the run will come to, by formulas and by a seeded "
        "simulation. Needs no devices.",
        "quickstart --chip v6e --picture plan.png",
    ),
    "render": (
        "write a launch's scripts or manifests, and start nothing",
        "Writes the plan of CONFIG's launch, its environment and what starts it on Slurm, GKE or "
        "TPU VMs into DIR.",
        "configs/pods/qwen3_8b_h200_8.toml --target slurm --out rendered",
    ),
    "preflight": (
        "check a machine, or all of a launch together, before a run",
        "Checks versions, clocks, the shared disk, the store of snapshots, ports, shared memory, "
        "devices and one sum over them; one line each.",
        "configs/quickstart.toml",
    ),
    "role": (
        "play one machine's part of a launch; called by what render writes",
        "Plays all roles of a machine (--host) or one (NAME) to the end of the run. Exit status 42 "
        "where it was stopped and can be started again, 134 where a peer is lost.",
        "--plan plan.json --host 0",
    ),
}
"""Name -> summary, description, arguments of an example."""


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
        for name, (summary, description, example) in _COMMANDS.items()
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
        "--out", type=Path, metavar="DIR", help="run directory, a new one (default: runs/NAME)"
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
    config = located(load(given.config, given.overrides))
    run_dir = given.out or Path("runs") / config.name
    _check_free(run_dir)
    _prepare(config, given.roles)
    config = _composed(config)
    from launch.run_directory import create_run

    create_run(run_dir, config, f"# resolved from {given.config}\n{resolved(config)}")
    try:
        return _start(config, run_dir, given.roles)
    except BaseException as error:
        if _discard_unused(run_dir) and isinstance(error, Stopped):
            raise error.before_it_began() from None
        raise


def _composed(config: RunConfig) -> RunConfig:
    from launch.compose import with_defaults

    return with_defaults(config)


def _resume(given: argparse.Namespace) -> int:
    config = config_of(given.run)
    _prepare(config, given.roles)

    from launch.resume import check_resumable, is_finished

    check_resumable(given.run)
    if is_finished(given.run):
        return _finish(config, given.run)
    check_teachers(config, given.run)
    return _start(config, given.run, given.roles)


def _prepare(config: RunConfig, roles: str = "local") -> None:
    """Processes look for their devices themselves: here they would be taken from them."""
    if roles == "local":
        env.prepare(config.devices_needed)
        return check_devices(config, env.available_devices())

    from launch.processes import check_ports

    check_ports(config)


def _start(config: RunConfig, run_dir: Path, roles: str) -> int:
    """Runs to the end from wherever the record is."""
    from launch.local import run_local
    from launch.processes import run_processes
    from launch.resume import seconds_on_record

    display = reporter(sys.stdout)
    began = time.time() - seconds_on_record(run_dir)
    start = run_local if roles == "local" else run_processes
    try:
        start(config, run_dir, display, began=began)
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
}


if __name__ == "__main__":
    entry()
