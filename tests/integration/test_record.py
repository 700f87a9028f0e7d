"""What a run leaves says everything, in few bytes, and its parts agree."""

import asyncio
import json
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.finish import finish
from rl_jax.metrics import names
from rl_jax.metrics.trace import read_spans
from rl_jax.metrics.writers import read
from rl_jax.replay import events, fates
from rl_jax.replay.fates import Kind
from rl_jax.replay.records import encode_record, scan
from rl_jax.replay.trajectory_log import TrajectoryLog, read_trajectories
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.tasks.base import ToolCall
from rl_jax.trajectories.types import RolloutKey
from tests.fakes.chatter import answer, chatter, family
from tests.fakes.runs import check_journal, config
from tests.integration.conftest import Start


def test_a_run_from_its_record_alone(start: Start) -> None:
    """A group drops for its age and one breaks, so every fate is there."""
    gate = asyncio.Event()

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        if key.prompt == 0:
            await gate.wait()
        if key.prompt == 2:
            raise TimeoutError("gone")
        return await answer(key, call)

    async def opened(key: RolloutKey) -> None:
        if key.prompt >= 12:
            gate.set()
        if key.prompt == 2:
            raise TimeoutError("gone")

    own = config(trainer={"updates": 8}, staleness={"tau": 1}, rollout={"tool_deadline_s": 60.0})
    run = start(own, family(chatter(on_open=opened, on_call=tool)))
    check_journal(run)
    summary = finish(own, run.path)

    told = json.loads((run.path / "summary.json").read_text())
    assert told["steps"] == 8 and told["versions_published"] == 8
    lines = read(run.path / "metrics.jsonl")
    assert told["trained_tokens"] == lines[-1][names.TRAINED_TOKENS]
    assert told["max_lag"] == max(line[names.LAG_MAX] for line in lines) <= 1
    rates = {e.when: e.rates["all"] for e in run.told(events.Evaluated)}
    assert (told["solve_rate_before"], told["solve_rate_after"]) == (
        rates["before"], rates["after"],
    )  # fmt: skip
    dropped = {e.group for e in run.told(events.GroupDropped)}
    recorded = [r for r in read_trajectories(run.path) if r.trajectory.copy_of is None]
    of_dropped = [r for r in recorded if r.trajectory.key[:2] in dropped and r.trajectory.valid]
    discarded = [r for r in recorded if r.fate.kind is Kind.DISCARDED and r.trajectory.valid]
    assert dropped and told["dropped"] == len(of_dropped) + len(discarded)
    assert {key.prompt for key in run.failures()} == {2}

    trace = json.loads((run.path / "trace.json").read_text())
    processes = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert processes == {"trainer", "sampler", "orchestrator"}
    spans = read_spans(run.path / "trace.json")
    tracks = defaultdict(set)
    for span in spans:
        tracks[span.process].add(span.track)
    assert {"loop", "publication", "device 0"} <= tracks["trainer"]
    assert {"swaps", "device 1"} <= tracks["sampler"]
    assert {"rollouts", "evaluation"} <= tracks["orchestrator"]
    assert {s.args["update"] for s in spans if s.track == "loop"} == set(range(1, 9))
    # Traces round to 0.1 microseconds.
    assert max(s.end for s in spans) == pytest.approx(summary.wall_seconds, abs=1e-3)

    page = (run.path / "report.html").read_text()
    for text in (f"{summary.trained_tokens:,}", f"{rates['after']:.2f}", "finished"):
        assert text in page
    assert (run.path / "picture.png").stat().st_size > 10_000
    assert list((run.path / "tensorboard").glob("events.*"))


def test_it_is_small(start: Start) -> None:
    """Bytes of a journal's event, events of a turn, bytes of a token of a trajectory, where what
    it says besides its tokens is left out: these trajectories are very short."""
    run = start(config(trainer={"updates": 6}))
    sizes = [
        len(payload) + 8
        for path in (run.path / "journal").rglob("*.journal")
        for payload in scan(path, may_be_cut=False).payloads
    ]
    recorded = [r for r in read_trajectories(run.path) if r.trajectory.copy_of is None]
    turns = sum(r.trajectory.turns for r in recorded)
    assert len(sizes) == len(run.journal())
    assert sum(sizes) <= 150 * len(sizes)
    assert len(sizes) <= 4 * turns
    members = [m for group, _ in run.groups().values() for m in group.members]
    bytes_, tokens = 0, sum(len(m.tokens) for m in members)
    for member in members:
        none = {name: getattr(member, name)[:0] for name in COLUMNS}
        for body, sign in ((member, 1), (replace(member, segments=(), **none), -1)):
            bytes_ += sign * len(encode_record(fates.encode_unit(fates.Unit(body, fates.OPEN))))
    assert 0 < bytes_ <= 16 * tokens + 40 * len(members), "and a few for segments"


COLUMNS = ("tokens", "loss_mask", "behavior_logprobs", "versions")


class Held:
    """Holds the writing of snapshots from version 1 on until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        write = SnapshotStore.write

        def held(store: SnapshotStore, manifest: Any, params: Any) -> None:
            if store.root.name == "snapshots" and manifest.version >= 1:
                assert self.open.wait(60.0)
            write(store, manifest, params)

        monkeypatch.setattr(SnapshotStore, "write", held)


def test_the_trainer_does_not_wait_for_a_publication(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 is not out until update 3 is done; the lag of what is taken counts from version 0
    meanwhile."""
    held = Held(monkeypatch)
    own = config(trainer={"updates": 5, "push_every": 2}, rollout={"ahead": 4.0})
    from launch.record import TrainerRecord

    on_update = TrainerRecord.on_update

    async def watched(record: TrainerRecord, update: int, metrics: Any) -> None:
        await on_update(record, update, metrics)
        if update == 3:
            held.open.set()

    monkeypatch.setattr(TrainerRecord, "on_update", watched)
    run = start(own)
    check_journal(run)
    lines = read(run.path / "metrics.jsonl")
    assert [line[names.POLICY_VERSION] for line in lines[:3]] == [0, 0, 0]
    assert [e.published_version for e in run.told(events.BatchTaken)[:3]] == [0, 0, 0]
    assert [e.version for e in run.told(events.VersionPublished)] == [0, 1, 2, 3]


ENOSPC = OSError(28, "No space left on device")


def full_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_jax.replay.records import Appender

    write, calls = Appender._write, iter(range(60))

    def full(appender: Any, batch: Any) -> None:
        if "trainer.journal" in str(appender._path) or next(calls, None) is None:
            raise ENOSPC
        write(appender, batch)

    monkeypatch.setattr(Appender, "_write", full)


def full_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    append, calls = TrajectoryLog._append, iter(range(3))

    def full(log: TrajectoryLog, unit: fates.Unit) -> Any:
        if log._program == "trainer" and next(calls, None) is None:
            log._appender.fail(log._directory / "trainer-000000.wal", ENOSPC)
        return append(log, unit)

    monkeypatch.setattr(TrajectoryLog, "_append", full)


def full_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SnapshotStore.write

    def full(store: SnapshotStore, manifest: Any, params: Any) -> None:
        if store.root.name == "snapshots" and manifest.version == 2:
            raise ENOSPC
        write(store, manifest, params)

    monkeypatch.setattr(SnapshotStore, "write", full)


@pytest.mark.parametrize("full", [full_journal, full_trajectories, full_snapshots])
def test_a_full_disk_is_one_error_and_the_record_is_gone_on_with(
    start: Start, monkeypatch: pytest.MonkeyPatch, full: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch.cli import guarded

    own = config(trainer={"updates": 8})
    with monkeypatch.context() as patched:
        full(patched)
        run = start(own, raises=OSError)

    def again() -> int:
        raise run.error

    assert guarded(again) == 2
    said = capsys.readouterr().err
    assert said.startswith("rl-jax: ") and said.count("\n") == 1 and "No space left" in said
    before = run.told(events.BatchTaken)
    run = start(own, path=run.path)
    assert run.told(events.BatchTaken)[: len(before)] == before
    assert [e.step for e in run.told(events.BatchTaken)] == list(range(1, 9))
    assert {p.name for p in Path(run.path / "snapshots").iterdir()} >= {str(v) for v in range(9)}
