"""[H] Asynchronous reinforcement learning for language-model agents, in JAX; `run` from Python."""

import importlib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """A run that ended well."""

    path: Path
    """Its directory, which every `rl-jax` command takes."""
    summary: Mapping[str, Any]
    """Its summary.json."""


def run(
    config: str | PathLike[str],
    *,
    loss: Callable[..., Any] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    out: str | PathLike[str] | None = None,
    set: Mapping[str, Any] | None = None,
) -> Run:
    """Trains what `config` describes, in a process of its own, and prints its lines as they come.

    `loss` and `advantage`: a function at the top level of a .py file, or what the configuration
    would name; the run keeps a copy of the file, as it is on the disk. `set`: values by dotted key,
    as in {"trainer.updates": 8}. `out`: the run's directory, a new one. An interrupt stops the run
    with a checkpoint and raises KeyboardInterrupt; `rl-jax resume` goes on. One that comes before
    the first version leaves no run, a second one does not wait for the checkpoint. Raises
    UserError, a ValueError, for mistakes, before anything is written, and RuntimeError where the
    run fails.
    """
    return importlib.import_module("launch.notebook").run(config, loss, advantage, out, set or {})
