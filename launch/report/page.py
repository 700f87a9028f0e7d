"""[H] `report.html`: a run in one file that needs neither network nor script.

What an agent, a task or a tool wrote is escaped, as is everything else but our own pictures.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jinja2

from launch.picture import can_draw
from launch.report import numbers
from launch.report.data import Label, RunData, load, originals, task_of
from launch.report.panel import svg
from launch.report.pictures import pictures
from launch.report.trajectory import (
    Decode,
    Turn,
    fate_text,
    name_of,
    outcome,
    picks,
    runs_of,
    turns,
)
from rl_jax.metrics import names
from rl_jax.metrics.trace import PUSH, SWAP, Span
from rl_jax.replay.fates import Recorded
from rl_jax.trajectories.types import NOT_SAMPLED

SHOWN_TOKENS = 600
"""Of a longer trajectory the page leaves out the middle."""


class Fact(NamedTuple):
    name: str
    value: str
    note: str = ""


class Shown(NamedTuple):
    """A trajectory as the page shows it."""

    why: str
    name: str
    outcome: str
    fate: str
    facts: str
    turns: list[Turn]


def write_report(
    run_dir: Path, decode: Decode, *, label: Label = task_of, out: Path | None = None
) -> Path:
    """Writes the report of the run in `run_dir` and returns where: `out`, or its `report.html`.

    `decode` gives the text of token ids, `label` what kind of task a trajectory was at. Raises
    as `load` does. Without matplotlib the page has no pictures.
    """
    run = load(run_dir, label)
    text = render(run, trajectories(run, run_dir, decode))
    out = out or run_dir / "report.html"
    part = out.with_name(f"{out.name}.part")
    part.write_text(text, encoding="utf-8", errors="replace")
    os.replace(part, out)
    return out


def render(run: RunData, shown: list[Shown]) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["runs"] = runs_of
    drawn = pictures(run) if can_draw() else []
    return environment.get_template("page.html.jinja").render(
        run=run,
        facts=list(facts(run)),
        held_out=numbers.held_out(run.events),
        pictures=[(p.title, p.look_for, [svg(f) for f in p.panels]) for p in drawn],
        can_draw=can_draw(),
        versions=versions(run),
        trajectories=shown,
        seconds=_seconds,
        NOT_SAMPLED=NOT_SAMPLED,
    )


def facts(run: RunData) -> Iterator[Fact]:
    """The headline numbers that there is data for."""
    if held := numbers.held_out(run.events):
        ends = f"{held[0].rate:.2f} → {held[-1].rate:.2f}" if held[1:] else f"{held[0].rate:.2f}"
        yield Fact("held-out solve rate", ends, f"version {held[0].version} → {held[-1].version}")
    _, reward = numbers.series(run.lines, names.REWARD)
    if len(reward):
        yield Fact("training reward", f"{numbers.smooth(reward)[-1]:.2f}", "running mean, at last")
    wanted = run.config.get("trainer", {}).get("updates")
    of = f"of {wanted}" if wanted else ""
    yield Fact("updates", f"{int(run.lines[-1][names.STEP]) if run.lines else 0}", of)
    yield Fact("versions pushed", str(max((v.version for v in versions(run)), default=0)))
    if run.lines:
        last = run.lines[-1]
        yield Fact("time", _seconds(last[names.WALL_SECONDS]))
        yield Fact("tokens trained on", f"{int(last.get(names.TRAINED_TOKENS) or 0):,}")
    yield from _staleness(run)
    if run.lines:
        share = numbers.waits(run.lines).shares["wait"]
        yield Fact("trainer waited for data", f"{share:.0%}", "of its time")


def _staleness(run: RunData) -> Iterator[Fact]:
    if lags := numbers.lag_tokens(run.rows, run.events):
        bound = f"bound τ = {run.tau}" if run.tau is not None else ""
        yield Fact("largest lag, in pushes", str(max(lags)), bound)
    lengths = numbers.lengths(run.rows)
    if len(lengths.offered):
        share = 1 - len(lengths.trained) / len(lengths.offered)
        yield Fact("not trained on", f"{share:.1%}", f"of {len(lengths.offered):,} valid rollouts")
    if len(lengths.trained):
        yield Fact("length bias", f"{lengths.difference:+.1%}", "trained against offered mean")
    _, fresh = numbers.series(run.lines, names.DLOGP_FRESH)
    if len(fresh):
        note = "at most, trainer and sampler under one version"
        yield Fact("log p differs by", f"{fresh.max():.1e}", note)


def versions(run: RunData) -> list[numbers.Version]:
    """The table of versions."""
    pushed, swapped = _ends(run, PUSH), _ends(run, SWAP)
    return numbers.versions(run.events, run.lines, pushed, swapped)


def _ends(run: RunData, name: str) -> dict[int, float]:
    """Version -> the end of its first span `name`."""
    told: list[Span] = [s for s in run.spans if s.name == name and "version" in s.args]
    return {s.args["version"]: s.end for s in sorted(told, key=lambda s: -s.end)}


def trajectories(run: RunData, run_dir: Path, decode: Decode) -> list[Shown]:
    """The picked trajectories, read anew: one that got another fate since is left out."""
    chosen = picks(run.rows, run.events)
    wanted = {(p.row.key, p.row.fate) for p in chosen}
    found: dict[object, Recorded] = {}
    for recorded in originals(run_dir, run.events) if wanted else ():
        if (name := (recorded.trajectory.key, recorded.fate)) in wanted:
            found[name] = recorded
    pairs = [(p, found.get((p.row.key, p.row.fate))) for p in chosen]
    return [show(p.why, recorded, decode) for p, recorded in pairs if recorded is not None]


def show(why: str, recorded: Recorded, decode: Decode) -> Shown:
    """One trajectory."""
    t = recorded.trajectory
    cuts = ", ".join(f"[{s.start}, {s.end}) version {s.version} {s.origin}" for s in t.segments)
    numbers_of = f"{len(t.tokens):,} tokens, {int(t.loss_mask.sum()):,} sampled, {t.turns} turns"
    facts = f"{numbers_of}; temperature {t.temperature:g}; cache: {cuts or 'not told'}"
    shown = turns(t, decode, SHOWN_TOKENS)
    return Shown(why, name_of(t.key), outcome(t), fate_text(recorded.fate), facts, shown)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    minutes, seconds = divmod(value, 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02.0f} s" if minutes else f"{seconds:.3g} s"
