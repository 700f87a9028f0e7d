"""[H] Runs as text: which there are, what a run's journal says, a trajectory turn by turn."""

import json
from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from launch.report import numbers
from launch.report.data import check_run, entries, is_running, lines, originals
from launch.report.trajectory import Decode, Turn, fate_text, name_of, outcome, runs_of, turns
from launch.terminal import Stream
from rl_jax.config.base import UserError
from rl_jax.metrics import names
from rl_jax.replay.events import VersionPublished
from rl_jax.replay.fates import Recorded
from rl_jax.trajectories.types import NOT_SAMPLED

EXAMPLES = 5
"""So many known names are shown to someone who asked for an unknown one."""


class Listed(NamedTuple):
    """One run as a line of the table."""

    name: str
    state: str
    updates: str
    version: str
    solve_rate: str
    started: str


def list_runs(directory: Path, out: Stream) -> None:
    """A table of the runs in `directory`, the newest last. Raises UserError where it is none."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give one that holds runs")
    found = [path.parent for path in directory.glob("*/config.toml")]
    if not found:
        out.write(f"no run in {directory}\n")
        return
    found.sort(key=lambda run: (_started(run), run.name))
    head = Listed("name", "state", "updates", "version", "solve rate", "started")
    table = [head, *map(_listed, found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        out.write("  ".join(cells).rstrip() + "\n")


def _listed(run_dir: Path) -> Listed:
    last = (lines(run_dir) or ({},))[-1]
    try:
        told = [entry.event for entry in entries(run_dir)]
        state = numbers.state(told, running=is_running(run_dir))
    except ValueError:
        told, state = [], "unreadable"
    held = numbers.held_out(told)
    versions = [event.version for event in told if isinstance(event, VersionPublished)]
    ends = [f"{h.rate:.2f}" for h in held[:1] + held[1:][-1:]]
    return Listed(
        name=run_dir.name,
        state=state,
        updates=str(last.get(names.STEP, 0)),
        version=str(max(versions, default="–")),
        solve_rate=" -> ".join(ends) or "–",
        started=datetime.fromtimestamp(_started(run_dir)).strftime("%Y-%m-%d %H:%M"),
    )


def _started(run_dir: Path) -> float:
    """A run begins with writing its configuration."""
    return (run_dir / "config.toml").stat().st_mtime


def print_events(run_dir: Path, out: Stream) -> None:
    """The events of all programs in the run's order, one JSON object a line.

    Raises UserError where `run_dir` is no run.
    """
    check_run(run_dir)
    for clock, program, sequence, event in entries(run_dir):
        stamp = {"clock": clock, "program": program, "sequence": sequence, "kind": event.kind}
        said = {field.name: getattr(event, field.name) for field in fields(event)}
        out.write(json.dumps(stamp | said, ensure_ascii=False, default=dict) + "\n")


def show(run_dir: Path, name: str, decode: Decode, out: Stream) -> None:
    """Every record of the trajectory `name` turn by turn.

    `name` is task/prompt/sample, which means every attempt, or task/prompt/sample/attempt. Raises
    UserError, which names a few that exist, where there is none of it, or where there is no run.
    """
    check_run(run_dir)
    found, others = [], []
    for recorded in originals(run_dir, (entry.event for entry in entries(run_dir))):
        key = recorded.trajectory.key
        if name in (f"{key.task}/{key.prompt}/{key.sample}", "/".join(map(str, key))):
            found.append(recorded)
        elif len(others) < EXAMPLES and name_of(key) not in others:
            others.append(name_of(key))
    if not found:
        there = f"there is {', '.join(others)}, ..." if others else "none is recorded yet"
        raise UserError(f"{run_dir}: no trajectory {name} (task/prompt/sample[/attempt]); {there}")
    for recorded in found:
        out.write("\n".join(_told(recorded, decode)) + "\n")


def _told(recorded: Recorded, decode: Decode) -> Iterable[str]:
    t = recorded.trajectory
    yield f"{'/'.join(map(str, t.key))}  {outcome(t)}  {fate_text(recorded.fate)}"
    yield f"{len(t.tokens):,} tokens, {t.turns} turns, temperature {t.temperature:g}"
    for segment in t.segments:
        yield f"cache [{segment.start}, {segment.end}) version {segment.version} {segment.origin}"
    for turn in turns(t, decode):
        yield from ("", *_spoken(turn))
    yield ""


def _spoken(turn: Turn) -> Iterable[str]:
    yield f"{turn.speaker}, tokens {turn.start} to {turn.start + len(turn.tokens) - 1}"
    yield f"  text      {_printable(turn.text)}"
    yield f"  ids       {' '.join(str(token.id) for token in turn.tokens)}"
    sampled = [token for token in turn.tokens if token.version != NOT_SAMPLED]
    if sampled:
        counted = runs_of(token.version for token in sampled)
        yield f"  versions  {', '.join(f'{version} x{n}' for version, n in counted)}"
        yield f"  log p     {' '.join(f'{token.logprob:.3f}' for token in sampled)}"


def _printable(text: str) -> str:
    """No agent's text may steer a terminal; lines go on under the first."""
    shown = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return shown.replace("\n", "\n            ")
