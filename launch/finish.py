"""[H] What is made of a record when a run is finished: summary, trace, picture, report."""

from collections.abc import Iterator
from pathlib import Path

from launch import build, picture
from launch.report.data import Label, spans
from launch.report.page import write_report
from launch.report.trajectory import Decode
from launch.summary import Summary, device_spans, summarise
from rl_jax.config.run import RunConfig
from rl_jax.metrics.trace import FOLDER, merge
from rl_jax.metrics.writers import read
from rl_jax.tasks.base import TaskFamily
from rl_jax.trajectories.types import Trajectory


def finish(config: RunConfig, run_dir: Path) -> Summary:
    """Writes `summary.json`, `trace.json`, the report and, with the `report` extra, the picture."""
    summary = summarise(run_dir, config.seed)
    (run_dir / "summary.json").write_text(summary.to_json())
    merge(sorted((run_dir / FOLDER).glob("*.json")), run_dir / "trace.json")
    if picture.can_draw():
        traced = spans(run_dir)
        picture.draw(
            run_dir / "picture.png",
            read(run_dir / "metrics.jsonl"),
            summary,
            config.staleness.tau,
            {program: device_spans(traced, program) for program in ("trainer", "sampler")},
        )
    report(config, run_dir)
    return summary


def report(config: RunConfig, run_dir: Path, out: Path | None = None) -> Path:
    """Writes the report of a run in any state; returns where."""
    family = build.build_task(config)
    return write_report(run_dir, decoder(family), label=labels(family, config.seed), out=out)


def decoder(family: TaskFamily) -> Decode:
    """The text of token ids, control tokens included."""
    tokenizer = build.build_renderer(family).tokenizer
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def labels(family: TaskFamily, seed: int) -> Label:
    """What kind of task a trajectory was at, as its task names it."""
    stream: Iterator[int] = family.order(seed)
    passed: list[int] = []

    def training(number: int) -> int:
        """The index of the prompt with this number in the run's endless order."""
        while len(passed) <= number:
            passed.append(next(stream))
        return passed[number]

    def label(trajectory: Trajectory) -> str:
        key = trajectory.key
        if key.task == family.heldout.name:
            return family.heldout.label(family.heldout.prompt(key.prompt))
        return family.train.label(family.train.prompt(training(key.prompt)))

    return label
