"""Where a run goes on, from journals and trajectory logs made by hand."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.report.data import seconds_on_record
from launch.resume import (
    check_resumable,
    drop_metrics_after,
    is_finished,
    resumption,
    rollouts_on_record,
)
from rl_jax.config.base import UserError
from rl_jax.metrics import names
from rl_jax.replay import events
from rl_jax.replay.log import Clock, open_log, write_format
from rl_jax.replay.trajectory_log import open_trajectory_log
from rl_jax.snapshots.store import MARKER
from rl_jax.trajectories.types import Group, RolloutKey
from tests.trajectories.build import group, same_group

Told = tuple[str, events.Event]


def key(prompt: int, sample: int = 0, attempt: int = 0) -> RolloutKey:
    return RolloutKey("lookup", prompt, sample, attempt)


def name(prompt: int) -> events.GroupId:
    return events.GroupId("lookup", prompt)


def started(*prompts: int, attempt: int = 0) -> list[Told]:
    keys = [key(p, sample, attempt) for p in prompts for sample in (0, 1)]
    return [("orchestrator", events.RolloutStarted(k)) for k in keys]


def done(*prompts: int, attempt: int = 0) -> list[Told]:
    keys = [key(p, sample, attempt) for p in prompts for sample in (0, 1)]
    return [("orchestrator", events.RolloutDone(k, "completed", 3)) for k in keys]


def put(*prompts: int) -> list[Told]:
    return [("trainer", events.GroupPut(name(p), 0, 6)) for p in prompts]


def batch(step: int, published: int, *prompts: int) -> Told:
    return ("trainer", events.BatchTaken(step, published, tuple(map(name, prompts))))


def published(version: int, step: int) -> Told:
    return ("trainer", events.VersionPublished(version, f"{version:02x}" * 32, step))


def write(
    run: Path, told: Sequence[Told], groups: Sequence[Group] = (), snapshots: Sequence[int] = ()
) -> Path:
    write_format(run)

    async def record() -> None:
        clock = Clock()
        logs = {name: open_log(run, name, clock) for name in {program for program, _ in told}}
        for program, event in told:
            await logs[program].append(event)
        for log in logs.values():
            await log.close()
        trajectories = open_trajectory_log(run, "trainer")
        for own in groups:
            await trajectories.put(own)
        await trajectories.close()

    asyncio.run(record())
    for version in snapshots:
        (run / "snapshots" / str(version)).mkdir(parents=True)
        (run / "snapshots" / str(version) / MARKER).touch()
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Killed in update 3, after a checkpoint of update 1: 0 and 1 are trained, 2 and 3 in batches
    to be trained again, 4 waits, 5 was dropped, 6 given up, 7 lacks a rollout, 8 was issued again
    before. Version 2's digest is on record, its snapshot is not."""
    told = [
        ("trainer", events.RunStarted(0, "ab" * 32, 0)),
        published(0, 0),
        ("orchestrator", events.Evaluated("before", 0, {"all": 0.5})),
        *started(0, 1, 2, 3, 5, 6),
        *done(0, 1, 2, 3, 5, 6),
        *put(0, 1, 2, 3, 5),
        ("orchestrator", events.GroupDiscarded(name(6), "broken")),
        batch(1, 0, 0, 1),
        ("trainer", events.UpdateDone(1, 0.1, 0.2)),
        published(1, 1),
        ("trainer", events.CheckpointSaved(1, 1)),
        *started(4, 7, 8),
        *done(4),
        *put(4),
        ("orchestrator", events.RolloutLost(key(8, 0), "the run stopped")),
        ("orchestrator", events.RolloutLost(key(8, 1), "the run stopped")),
        *started(8, attempt=1),
        ("orchestrator", events.RolloutDone(key(7, 1), "completed", 3)),
        ("trainer", events.GroupDropped(name(5), "old")),
        batch(2, 1, 2),
        ("trainer", events.UpdateDone(2, 0.1, 0.2)),
        published(2, 2),
        batch(3, 1, 3),
    ]
    groups = [group(prompt) for prompt in (0, 1, 2, 3, 5, 4)]
    return write(tmp_path / "run", told, groups, snapshots=(0, 1))


def test_where_a_killed_run_goes_on(run: Path) -> None:
    found = resumption(run)
    assert found is not None
    assert (found.update, found.version, found.newest) == (1, 1, 1)
    assert {v: d[:2] for v, d in found.digests.items()} == {0: "00", 1: "01", 2: "02"}
    logged = {step: [g.prompt for g in taken.groups] for step, taken in found.logged.items()}
    assert logged == {2: [2], 3: [3]}
    assert [taken.published_version for taken in found.logged.values()] == [1, 1]
    assert same_group(found.logged[2].groups[0], group(2))
    assert [g.prompt for g in found.queued] == [4]
    resume, lost, evaluated = found.rollouts
    assert resume.next_prompt == 9
    assert resume.reissue == ((7, 1), (8, 2)), "with the attempt that follows the last"
    # By the oldest version that sampled a token; the newest at its start was 1 already.
    assert resume.queued == ((2, 0), (3, 0), (4, 0)), "batches that are done again are not settled"
    # Trained 0, 1; in batches or queued 2, 3, 4; under way 7, 8.
    assert (resume.started, resume.published) == (7, 1)
    assert lost == (key(7, 0), key(8, 0, 1), key(8, 1, 1)), "the one that ended is not"
    assert evaluated == {"before"}


def test_a_group_whose_put_was_cut_short_is_queued(tmp_path: Path) -> None:
    """Its tokens are durable, the journal does not know: it was put."""
    told = [published(0, 0), *started(0), *done(0)]
    found = resumption(write(tmp_path / "run", told, [group(0)], snapshots=(0,)))
    assert found is not None and [g.prompt for g in found.queued] == [0]
    assert found.rollouts.resume.reissue == () and found.rollouts.lost == ()
    assert found.update == 0 and found.logged == {}


@pytest.mark.parametrize("digest", [False, True])
def test_without_version_0_a_run_begins_anew(tmp_path: Path, digest: bool) -> None:
    told = [("trainer", events.RunStarted(0, "ab" * 32, 0)), *([published(0, 0)] * digest)]
    assert resumption(write(tmp_path / "run", told)) is None


def test_a_missing_group_is_one_line(tmp_path: Path) -> None:
    told = [published(0, 0), *started(0, 1), *done(0, 1), *put(0, 1), batch(1, 0, 1)]
    run = write(tmp_path / "run", told, [group(0)], snapshots=(0,))
    with pytest.raises(UserError, match=r"lacks the group GroupId\(task='lookup', prompt=1\)"):
        resumption(run)


def test_reading_where_it_goes_on_changes_nothing(run: Path) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    resumption(run)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_beside_a_trainer_that_is_further_its_batches_are_settled(run: Path) -> None:
    found = rollouts_on_record(run, 3)
    assert found is not None
    assert [prompt for prompt, _ in found.resume.queued] == [4]
    assert found.resume.started == 7, "the same groups, others settled"


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    """Unless nothing was made of its record."""
    for reason in ("stopped", "finished"):
        run = write(tmp_path / reason, [("trainer", events.RunEnded(reason))])
        check_resumable(run)
        assert is_finished(run) == (reason == "finished")
        (run / "summary.json").touch()
        if reason == "finished":
            with pytest.raises(UserError, match="nothing to resume"):
                check_resumable(run)
        else:
            check_resumable(run)


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [("trainer", events.RunEnded("stopped"))])

    async def main() -> None:
        log = open_log(run, "trainer", Clock())
        with pytest.raises(UserError, match="being written by another process"):
            check_resumable(run)
        await log.close()

    asyncio.run(main())
    check_resumable(run)


def metrics(run: Path, *steps: int) -> Path:
    run.mkdir(exist_ok=True)
    path = run / "metrics.jsonl"
    lines = [
        {names.STEP: s, names.WALL_SECONDS: 10.0 * s, names.TRAINED_TOKENS: 100 * s} for s in steps
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_counts_are_those_of_the_checkpoint(run: Path) -> None:
    metrics(run, 1, 2)
    found = resumption(run)
    assert found is not None and found.counts[names.TRAINED_TOKENS] == 100
    assert seconds_on_record(run) == 20.0


def test_lines_of_updates_that_are_done_again_go(tmp_path: Path) -> None:
    assert seconds_on_record(tmp_path) == 0.0
    drop_metrics_after(tmp_path / "metrics.jsonl", 0)
    assert not (tmp_path / "metrics.jsonl").exists()
    path = metrics(tmp_path, 1, 2, 3)
    with path.open("a") as file:
        file.write('{"step": 4, "wa')
    drop_metrics_after(path, 2)
    assert [json.loads(line)[names.STEP] for line in path.read_text().splitlines()] == [1, 2]
