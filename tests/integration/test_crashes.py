"""A program that breaks ends the run at once with its own error, and the journal stays readable."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import build
from launch.cli import NEW_RUN
from rl_jax.config.base import UserError
from rl_jax.replay import events, journal
from rl_jax.replay.trajectory_log import read_trajectories
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.tasks.base import ToolCall
from rl_jax.trajectories.types import RolloutKey
from tests.fakes.chatter import chatter, family
from tests.fakes.runs import Run, config
from tests.integration.conftest import Start


class Broken(Exception):
    pass


def failing(program: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Raises at call number `after`."""
    calls = iter(range(1, after + 1))

    def run(*args: Any) -> Any:
        if next(calls) == after:
            raise Broken("the device is gone")
        return program(*args)

    return run


def readable(run: Run) -> list[events.Event]:
    """The journals, which nobody holds any more and nothing was cut from."""

    async def reopen(path: Path) -> None:
        log, cut = journal.reopen(path)
        await log.close()
        assert cut == 0

    journals = sorted((run.path / "journal").iterdir())
    assert [path.name for path in journals] == ["orchestrator", "sampler", "trainer"]
    for path in journals:
        asyncio.run(reopen(path))
    assert not any(isinstance(e, events.RunEnded) for e in run.journal())
    list(read_trajectories(run.path))
    return run.journal()


def test_a_crash_of_the_trainer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_step = build.compile_step

    def compiled(*args: Any) -> build.StepProgram:
        made = compile_step(*args)
        return made._replace(step=failing(made.step, 2))

    monkeypatch.setattr(build, "compile_step", compiled)
    run = start(config(), raises=Broken)
    assert str(run.error) == "the device is gone"
    readable(run)
    assert [e.step for e in run.told(events.UpdateDone)] == [1]
    assert [e.step for e in run.told(events.BatchTaken)] == [1, 2]


def test_a_crash_of_the_sampler(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """While 16 rollouts wait for it, a swap perhaps, and the trainer for groups."""
    compile_sampler = build.compile_sampler

    def compiled(*args: Any) -> Any:
        made = compile_sampler(*args)
        return made._replace(steps={n: failing(step, 30) for n, step in made.steps.items()})

    monkeypatch.setattr(build, "compile_sampler", compiled)
    run = start(config(trainer={"updates": 100}), raises=Broken)
    assert run.error.__class__ is Broken
    readable(run)
    assert len(run.told(events.VersionPublished)) >= 1


def test_a_bug_in_a_task(start: Start) -> None:
    async def tool(key: RolloutKey, call: ToolCall) -> str:
        if key.prompt == 5:
            raise ZeroDivisionError("a bug")
        return "w1"

    own = config(trainer={"updates": 100})
    run = start(own, family(chatter(on_call=tool)), raises=ZeroDivisionError)
    assert str(run.error) == "a bug"
    assert len([e for e in readable(run) if isinstance(e, events.BatchTaken)]) >= 1


def test_a_failed_publication(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second push."""
    inner = SnapshotStore.write
    write = failing(inner, 3)

    def full(store: SnapshotStore, *args: Any) -> None:
        if store.root.name == "snapshots":
            return write(store, *args)
        return inner(store, *args)

    monkeypatch.setattr(SnapshotStore, "write", full)
    run = start(config(), raises=Broken)
    readable(run)
    assert [e.version for e in run.told(events.VersionPublished)] == [0, 1, 2]
    assert next(e.step for e in run.told(events.UpdateDone)) == 1
    assert SnapshotStore(run.path / "snapshots").versions() == (0, 1)


def test_more_held_out_questions_than_there_are(start: Start, tmp_path: Any) -> None:
    run = start(config(evaluation={"questions": 41}), raises=UserError)
    assert str(run.error) == (
        "evaluation.questions = 41: needs at most 40, the held-out questions of "
        'task.name = "lookup"'
    )
    assert {path.name for path in run.path.iterdir()} <= NEW_RUN, "nothing was written"


def test_a_task_without_a_tokenizer(start: Start, tmp_path: Any) -> None:
    missing = family()._replace(tokenizer_directory=tmp_path / "none")
    run = start(config(), missing, raises=UserError)
    assert str(run.error).startswith(f"tokenizer of the task: {tmp_path}/none/tokenizer.json does")
    assert "\n" not in str(run.error)
