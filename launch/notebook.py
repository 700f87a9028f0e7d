"""[H] `rl_jax.run`: the command `rl-jax run` in a child process, for notebooks and scripts.

The child has a jax of its own, is interrupted when its parent is, and does not outlive it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from launch.cli import INTERRUPTED, USER_ERROR, leave, main
from launch.engine.child import follow_parent
from rl_jax import Run
from rl_jax.config.base import UserError, toml_value
from rl_jax.config.load import load

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (sys.executable, "-u", "-P", "-m", "launch.notebook")
"""This file as a program, which takes the arguments of `rl-jax` and imports, like that command,
nothing out of the working directory: a file's copy could not be replayed from elsewhere."""
_OWN_FILE = "a run keeps the file of its {field}: write a function at the top level of a .py file"


def run(
    config: str | os.PathLike[str],
    loss: object,
    advantage: object,
    out: str | os.PathLike[str] | None,
    values: Mapping[str, Any],
) -> Run:
    """What `rl_jax.run` says."""
    chosen = {"loss.recipe": ("loss", loss), "advantage.name": ("advantage", advantage)}
    named = {key: name_of(*own) for key, own in chosen.items() if own[1] is not None}
    for key in (key for key, value in values.items() if value is None):
        raise UserError(f"set: {key} is None, which TOML has not; leave the key out")
    overrides = [f"{key}={toml_value(value)}" for key, value in {**values, **named}.items()]
    run_dir = Path(out) if out is not None else Path("runs") / load(Path(config), overrides).name
    arguments = ["run", str(config), "--out", str(run_dir)]
    for override in overrides:
        arguments += ["--set", override]
    _to_its_end(arguments)
    return Run(run_dir, json.loads((run_dir / "summary.json").read_text()))


def name_of(field: str, function: object) -> str:
    """How a configuration names `function`: file.py:name, or package.module:name where a package
    holds its module. UserError, naming `field`, where a run could not keep or import it."""
    own_file = _OWN_FILE.format(field=field)
    if isinstance(function, str):
        return function
    if isinstance(function, partial | type):
        raise UserError(
            f"{field} is {function!r:.80}, needs a function; give its keywords with "
            f"set={{{field + '.KEYWORD'!r}: ...}}"
        )
    if not isinstance(function, FunctionType):
        raise UserError(f"{field} is {function!r:.80}, needs a function, not what it returns")
    name, module = function.__qualname__, sys.modules.get(function.__module__)
    if function.__name__ == "<lambda>":
        raise UserError(f"{field} is a lambda; {own_file}")
    if "<locals>" in name:
        outer = name.partition(".")[0]
        raise UserError(f"{field} is {function.__name__}, made inside {outer}; {own_file}")
    if function.__module__ == "__main__":
        raise UserError(f"{field} is {name}, defined in the notebook or script itself; {own_file}")
    if module is None or getattr(module, name, None) is not function or not module.__file__:
        raise UserError(f"{field} is {name}, which {function.__module__} does not hold; {own_file}")
    if module.__package__:
        return f"{module.__name__}:{name}"
    file = Path(module.__file__).resolve()
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{name}"


def _to_its_end(arguments: list[str]) -> None:
    """Runs the command and prints what it says; UserError and RuntimeError where it fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        # Or an interrupt of a notebook, sent to the whole group, would reach it twice.
        start_new_session=True,
    )
    with process:
        last = _printed(process)
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode == USER_ERROR:
        raise UserError(last.removeprefix("rl-jax: "))
    if process.returncode:
        raise RuntimeError(f"the run ended with status {process.returncode}: {last}")


def _printed(process: subprocess.Popen[str]) -> str:
    """The last line that was printed. Every interrupt is handed on: a second one insists."""
    assert process.stdout is not None
    last = ""
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip() or last
            process.wait()
            return last
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    follow_parent()
    leave(main())
