"""A run that was stopped or killed goes on: nothing is repeated, skipped or lost."""

import asyncio
import signal
from itertools import chain, repeat
from typing import Any

import pytest

from launch import build
from launch.stop import Stop, Stopped
from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.orchestrator.loop import Orchestrator
from rl_jax.replay import events
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.tasks.base import TaskFamily, ToolCall
from rl_jax.trajectories.types import RolloutKey
from tests.fakes.chatter import answer, chatter, family
from tests.fakes.runs import Run, check_journal, config, replayed
from tests.integration.conftest import Start
from tests.integration.test_crashes import Broken, failing


def signalled(number: int, prompt: int) -> TaskFamily:
    """A tool of this prompt's first rollout raises the signal, once."""
    left = [number]

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        if key.prompt == prompt and left:
            signal.raise_signal(left.pop())
        return await answer(key, call)

    return family(chatter(on_call=tool))


def last_checkpoint(run: Run) -> tuple[int, int]:
    """Update and newest version at the last one on record; it is on disk."""
    last = run.told(events.CheckpointSaved)[-1]
    assert SnapshotStore(run.path / "checkpoints").latest() == last.step
    return last.step, last.version


def check_whole(run: Run) -> None:
    """It ended as if it had never been interrupted, and replays bit for bit."""
    check_journal(run)
    updates = run.config.trainer.updates
    lines = read(run.path / "metrics.jsonl")
    assert [line[names.STEP] for line in lines] == list(range(1, updates + 1))
    walls = [line[names.WALL_SECONDS] for line in lines]
    assert walls == sorted(walls) and walls[0] > 0
    evaluated = [e.when for e in run.told(events.Evaluated)]
    assert evaluated == ["before", "after"], "each once"
    versions = run.told(events.VersionPublished)[-1].version
    assert versions == -(-updates // run.config.trainer.push_every)
    assert run.told(events.RunEnded)[-1].reason == "finished"
    done = replayed(run)
    assert (done.first_difference, done.same_numerics) == ("", True)
    assert (done.updates, done.versions) == (updates, versions + 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle(start: Start, number: signal.Signals) -> None:
    """Two pushes apart a checkpoint; the stop adds one at the last update."""
    own = config(trainer={"updates": 8, "push_every": 2}, checkpoint={"every": 2})
    run = start(own, signalled(number, 7), raises=Stopped)
    assert str(run.error) == (f"stopped by {number.name}; go on with `rl-jax resume {run.path}`")
    assert isinstance(run.error, Stopped) and run.error.status == 128 + number
    assert run.told(events.RunEnded)[-1].reason == "stopped"
    done = [e.step for e in run.told(events.UpdateDone)]
    assert 0 < len(done) < 8
    step, _ = last_checkpoint(run)
    assert step == done[-1] == run.told(events.BatchTaken)[-1].step
    before = len(run.journal())

    run = start(own, path=run.path)
    assert [e.update for e in run.told(events.RunStarted)] == [0, step]
    again = [e.step for e in run.journal()[before:] if isinstance(e, events.UpdateDone)]
    assert again == list(range(step + 1, 9)), "no update is done again"
    check_whole(run)


def test_twice_and_with_groups_that_wait(start: Start) -> None:
    """Stopped in two places, two batches ahead: what was queued is trained on, not sampled anew."""
    own = config(trainer={"updates": 9}, rollout={"ahead": 2.0})
    run = start(own, signalled(signal.SIGTERM, 7), raises=Stopped)
    taken = {g for e in run.told(events.BatchTaken) for g in e.groups}
    queued = {e.group for e in run.told(events.GroupPut)} - taken
    queued -= {e.group for e in run.told(events.GroupDropped)}
    first = [e.key for e in run.told(events.RolloutStarted)]
    run = start(own, signalled(signal.SIGTERM, 13), raises=Stopped, path=run.path)
    later = [e.key for e in run.told(events.RolloutStarted)][len(first) :]
    assert not {(g.task, g.prompt) for g in queued} & {(k.task, k.prompt) for k in later}
    again = [key for key in later if key.attempt]
    lost = {e.key for e in run.told(events.RolloutLost)}
    assert {key._replace(attempt=0) for key in again} >= {k for k in lost if not k.attempt}
    assert len(again) % own.trainer.group_size == 0, "a group is issued again whole"
    run = start(own, path=run.path)
    assert len(run.told(events.RunStarted)) == 3
    check_whole(run)


def test_a_stop_before_version_0(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on record yet, so the run begins anew, in the same directory."""
    with monkeypatch.context() as patched:
        patched.setattr(Stop, "listen", lambda stop: stop.ask())
        patched.setattr(Stop, "ignore", lambda stop: None)
        run = start(config(), raises=Stopped)
    assert "stopped by a request" in str(run.error)
    assert not (run.path / "journal").exists()
    run = start(config(), path=run.path)
    assert len(run.told(events.RunStarted)) == 1
    check_whole(run)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stop_in_an_evaluation(start: Start, when: str) -> None:
    """Its questions are asked anew; the other evaluation is not made again."""
    own = config()
    train = family()
    opened: list[RolloutKey] = []

    async def opens(key: RolloutKey) -> None:
        opened.append(key)
        if len(opened) == (5 if when == "before" else own.evaluation.questions + 5):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Future()

    asked = chatter("chatter-heldout", size=40, on_open=opens)
    run = start(own, train._replace(heldout=asked), raises=Stopped)
    assert [e.when for e in run.told(events.Evaluated)] == ([] if when == "before" else ["before"])
    updates = [e.step for e in run.told(events.UpdateDone)]
    assert updates == ([] if when == "before" else [1, 2, 3])
    run = start(own, path=run.path)
    check_whole(run)


def killed(start: Start, monkeypatch: pytest.MonkeyPatch, own: Any, at: int) -> Run:
    """The process of a run dies with batch `at` on record and its update not done."""
    compile_step = build.compile_step

    def compiled(*args: Any) -> build.StepProgram:
        made = compile_step(*args)
        return made._replace(step=failing(made.step, at))

    with monkeypatch.context() as patched:
        patched.setattr(build, "compile_step", compiled)
        patched.setattr(Orchestrator, "left", lambda own: [])  # nobody is there to save them
        return start(own, raises=Broken)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_batches_on_record_are_trained_on_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Died in update 6 of 8. The checkpoint is of update 5, 4, or there is none: versions that
    are made again have their first digests, which the run itself checks."""
    own = config(trainer={"updates": 8}, checkpoint={"every": every})
    run = killed(start, monkeypatch, own, 6)
    batches = run.told(events.BatchTaken)
    assert [e.step for e in batches] == [1, 2, 3, 4, 5, 6]
    saved = [e.step for e in run.told(events.CheckpointSaved)]
    done = [e.step for e in run.told(events.UpdateDone)]
    before = len(run.journal())
    assert done == [1, 2, 3, 4, 5]

    run = start(own, path=run.path)
    assert run.told(events.BatchTaken)[:6] == batches
    again = [e.step for e in run.journal()[before:] if isinstance(e, events.UpdateDone)]
    assert again == list(range(max(saved, default=0) + 1, 9))
    first: dict[int, events.UpdateDone] = {}
    assert all(first.setdefault(e.step, e) == e for e in run.told(events.UpdateDone)), "the very"
    assert [e.version for e in run.told(events.VersionPublished)] == list(range(9))
    assert replayed(run).first_difference == ""


def test_other_weights_are_told_apart(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made again after the checkpoint is not what was published: the run says so."""
    own = config(trainer={"updates": 4}, checkpoint={"every": 9})
    run = killed(start, monkeypatch, own, 3)
    compile_step = build.compile_step

    def compiled(*args: Any) -> build.StepProgram:
        made = compile_step(*args)
        signs = chain([1], repeat(-1))

        def step(state: Any, batch: Any) -> Any:
            return made.step(state, batch._replace(advantages=batch.advantages * next(signs)))

        return made._replace(step=step)

    monkeypatch.setattr(build, "compile_step", compiled)
    run = start(own, raises=RuntimeError, path=run.path)
    assert str(run.error) == (
        "update 2 done again after the checkpoint does not give version 2 bit for bit; "
        "`rl-jax replay` names the first difference"
    )
