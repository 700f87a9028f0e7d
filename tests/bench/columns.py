"""Runs side by side: one TOML with a base and columns that change some of its keys, as a table.

    python -m tests.bench.columns tests/bench/async_vs_sync.toml [--out DIR] [--seeds 0 1 2]

A column's runs start from the same weights, made once a seed. Rates are of the time between the
first batch taken and the last update; shares of time likewise. "Offered" are all valid rollouts
that ended, "trained" those that an update used. Runs that are there already are not made again.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from launch.build import build_task
from launch.finish import labels
from launch.report.data import originals, spans
from launch.summary import busy_seconds, device_spans
from rl_jax.config.base import toml_value
from rl_jax.config.load import lines, load
from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.replay.fates import Kind, Recorded
from rl_jax.replay.log import merged

RECENT = 8
"""Updates that a solve rate is the mean over."""


@dataclass(frozen=True)
class Outcome:
    """One run; `updates` are its lines of metrics."""

    updates: list[dict[str, Any]]
    seconds: float
    tokens: int
    trained_length: float
    offered_length: float
    label_bias: float
    """Half the sum of |share of a kind of task among trained - among offered|."""
    dropped_stale: int
    given_up: int
    trainer_idle: float
    sampler_idle: float
    solved_after: float

    @property
    def rate(self) -> float:
        """Trained tokens a second."""
        return self.tokens / self.seconds

    def solved_at(self, name: str, value: float) -> float:
        """Mean training reward of the `RECENT` updates up to where metric `name` reaches `value`,
        counted from the first update."""
        first = self.updates[0][name]
        upto = [u[names.REWARD] for u in self.updates if u[name] - first <= value]
        return mean(upto[-RECENT:])


def outcome(run_dir: Path) -> Outcome:
    """What a finished run of the bench came to."""
    updates = read(run_dir / "metrics.jsonl")
    first, last = updates[0], updates[-1]
    begin = first[names.WALL_SECONDS] - first[names.STEP_SECONDS] - first[names.WAIT_SECONDS]
    seconds = last[names.WALL_SECONDS] - begin
    recorded = originals(run_dir, [entry.event for entry in merged(run_dir)])
    valid = [r for r in recorded if r.trajectory.valid and r.fate.kind is not Kind.EVALUATED]
    trained = [len(r.trajectory.tokens) for r in valid if r.fate.kind is Kind.TRAINED]

    traced = spans(run_dir)

    def idle(program: str) -> float:
        busy = device_spans(traced, program)
        inside = [(max(a, begin), min(b, begin + seconds)) for a, b in busy]
        return 1 - busy_seconds(inside) / seconds

    summary = json.loads((run_dir / "summary.json").read_text())
    return Outcome(
        updates,
        seconds,
        last[names.TRAINED_TOKENS],
        mean(trained),
        mean(len(r.trajectory.tokens) for r in valid),
        _bias(valid, run_dir),
        sum(r.fate.kind is Kind.DROPPED for r in valid),
        sum(r.fate.kind is Kind.DISCARDED for r in valid),
        idle("trainer"),
        idle("sampler"),
        summary["solve_rate_after"],
    )


def _bias(offered: Sequence[Recorded], run_dir: Path) -> float:
    config = load(run_dir / "config.toml")
    label = labels(build_task(config), config.seed)
    kinds = Counter(label(r.trajectory) for r in offered)
    trained = Counter(label(r.trajectory) for r in offered if r.fate.kind is Kind.TRAINED)
    share = {k: trained[k] / trained.total() - n / kinds.total() for k, n in kinds.items()}
    return sum(map(abs, share.values())) / 2


def table(columns: Mapping[str, list[Outcome]]) -> str:
    """Markdown: a column an order, means over its seeds; ratios are to the first column."""
    baseline = next(iter(columns.values()))

    def row(label: str, cells: Iterable[str]) -> str:
        return f"| {' | '.join([label, *cells])} |"

    def numbers(form: str, value: Callable[[Outcome], float]) -> list[str]:
        return [form.format(mean(map(value, runs))) for runs in columns.values()]

    def ratios(runs: list[Outcome]) -> str:
        each = [own.rate / other.rate for own, other in zip(runs, baseline, strict=True)]
        return f"{mean(each):.2f} ({', '.join(f'{ratio:.2f}' for ratio in each)})"

    def equal(name: str) -> list[str]:
        """Solve rates where every order has come as far in `name` as the one that came least."""
        cells = []
        for runs in columns.values():
            at = []
            for seed, own in enumerate(runs):
                spans = [
                    c[seed].updates[-1][name] - c[seed].updates[0][name] for c in columns.values()
                ]
                at.append(own.solved_at(name, min(spans)))
            cells.append(f"{mean(at):.3f}")
        return cells

    return "\n".join([
        row("", columns),
        row("---", ["---"] * len(columns)),
        row("trained tokens/s", numbers("{:,.0f}", lambda o: o.rate)),
        row("to the first column (each seed)", map(ratios, columns.values())),
        row("updates", numbers("{:.0f}", lambda o: len(o.updates))),
        row("trained length", numbers("{:.2f}", lambda o: o.trained_length)),
        row("offered length", numbers("{:.2f}", lambda o: o.offered_length)),
        row(
            "trained against offered",
            numbers("{:+.1%}", lambda o: o.trained_length / o.offered_length - 1),
        ),
        row("kinds of tasks, trained against offered", numbers("{:.1%}", lambda o: o.label_bias)),
        row("rollouts dropped as stale", numbers("{:.0f}", lambda o: o.dropped_stale)),
        row("rollouts finished and given up", numbers("{:.0f}", lambda o: o.given_up)),
        row("mean lag, pushes", numbers("{:.2f}", lambda o: mean(
            u[names.LAG_MEAN] for u in o.updates))),
        row("effective sample size", numbers("{:.1%}", lambda o: mean(
            u[names.ESS_SHARE] for u in o.updates))),
        row("tokens masked as stale", numbers("{:.1%}", lambda o: mean(
            u.get(names.STALE_SHARE, 0.0) for u in o.updates))),
        row("trainer idle", numbers("{:.0%}", lambda o: o.trainer_idle)),
        row("sampler idle", numbers("{:.0%}", lambda o: o.sampler_idle)),
        row("solve rate at equal tokens", equal(names.TRAINED_TOKENS)),
        row("solve rate at equal time", equal(names.WALL_SECONDS)),
        row("held-out solve rate at the end", numbers("{:.3f}", lambda o: o.solved_after)),
    ])  # fmt: skip


def run(base: Path, out: Path, overrides: Mapping[str, Any]) -> None:
    """One run of its own process, unless `out` holds it already."""
    if (out / "summary.json").is_file():
        return
    flags = [f"--set={key}={toml_value(value)}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "launch.cli", "run", str(base), "--out", str(out), *flags]
    print(" ".join(command[2:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("setup", type=Path)
    parser.add_argument("--out", type=Path, help="default: runs/ and the name of the setup")
    parser.add_argument("--seeds", type=int, nargs="+")
    given = parser.parse_args()
    setup = tomllib.loads(given.setup.read_text())
    folder = given.out or Path("runs") / given.setup.stem
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.toml"
    base.write_text("\n".join(lines(setup["base"])).strip() + "\n")
    columns: dict[str, list[Outcome]] = {name: [] for name in setup["columns"]}
    for seed in given.seeds or setup["seeds"]:
        start = folder / f"start-{seed}"
        run(base, start, {"seed": seed, "trainer.updates": 0})
        for name, changes in setup["columns"].items():
            own = {f"{section}.{key}": v for section, t in changes.items() for key, v in t.items()}
            weights = {"seed": seed, "warm_start.snapshot": str(start / "snapshots" / "0")}
            out = folder / f"{name.replace(' ', '-')}-{seed}"
            run(base, out, weights | own)
            columns[name].append(outcome(out))
    print(table(columns))


if __name__ == "__main__":
    main()
