"""A run's record alone gives its updates again, bit for bit, and a record that was touched not."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch import build
from launch import replay as replaying
from rl_jax.config.base import UserError
from rl_jax.replay import events, fates, journal, log
from rl_jax.replay.records import encode_record, scan, unpack
from tests.fakes.chatter import family
from tests.fakes.runs import Run, check_journal, config, replayed
from tests.integration.conftest import Start


@pytest.fixture(scope="module")
def recorded() -> list[Run]:
    """The run that every test takes a copy of, once the first has made it."""
    return []


@pytest.fixture
def run(
    start: Start,
    recorded: list[Run],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Five updates, all of whose groups lie in a `.wal` again, so a test can change them."""
    if not recorded:
        made = start(config(trainer={"updates": 5, "push_every": 2}, checkpoint={"every": 9}))
        check_journal(made)
        recorded.append(moved(made, tmp_path_factory.mktemp("recorded") / "run"))
    monkeypatch.setattr(build, "build_task", lambda config: family())
    return moved(recorded[0], tmp_path / "copy")


def moved(run: Run, path: Path) -> Run:
    """What it left, copied to `path`."""
    return Run(run.config, shutil.copytree(run.path, path), None, run.notes)


def rewrite_groups(
    run: Run, change: Callable[[events.GroupId, fates.Unit], fates.Unit | None]
) -> None:
    """Every group of the trainer's trajectory log as `change` makes it; None takes it away."""
    units = [fates.Unit(group, fate) for group, fate in run.groups().values()]
    for path in (run.path / "trajectories").glob("trainer-*"):
        path.unlink()
    made = [change(events.group_id(unit.body), unit) for unit in units]
    records = [encode_record(fates.encode_unit(unit)) for unit in made if unit is not None]
    (run.path / "trajectories" / "trainer-000000.wal").write_bytes(b"".join(records))


def rewrite_journal(run: Run, change: Callable[[events.Event], events.Event]) -> None:
    """Every event of the trainer's journal as `change` makes it."""
    path = run.path / "journal" / "trainer" / "000000.journal"
    entries = [
        log.decode_entry("trainer", unpack(p)) for p in scan(path, may_be_cut=False).payloads
    ]
    changed = [entry._replace(event=change(entry.event)) for entry in entries]
    path.write_bytes(b"".join(encode_record(log.encode_entry(entry)) for entry in changed))


def test_an_untouched_one_is_equal_bit_for_bit(run: Run) -> None:
    done = replayed(run)
    assert (done.updates, done.versions, done.first_difference) == (5, 4, "")
    assert done.same_numerics
    said = replaying.report(run.path, done)
    assert (
        said[0] == f"{run.path}: 5 updates and 4 versions rebuilt, every digest equal bit for bit"
    )
    rewrite_groups(run, lambda name, unit: unit)
    assert replayed(run).first_difference == "", "written again as it was"


def test_one_flipped_bit_of_a_log_probability_is_found(run: Run) -> None:
    """In update 3: the loss of that update is the first that differs. The sign bit of the least
    part of the mantissa may vanish in a sum, so a higher one is flipped."""
    target = run.told(events.BatchTaken)[2].groups[0]

    def flip(name: events.GroupId, unit: fates.Unit) -> fates.Unit:
        if name != target:
            return unit
        first, *rest = unit.body.members
        assert first.copy_of is None
        bits = first.behavior_logprobs.copy()
        bits.view(np.uint32)[int(first.loss_mask.argmax())] ^= 1 << 22
        members = (replace(first, behavior_logprobs=bits), *rest)
        return unit._replace(body=replace(unit.body, members=members))

    rewrite_groups(run, flip)
    done = replayed(run)
    assert done.first_difference.startswith("update 3: loss ")
    assert "on record" in done.first_difference and done.updates == 3
    first, _ = replaying.report(run.path, done)
    assert first.startswith(f"{run.path}: first difference at update 3: loss ")


def test_another_order_of_a_batch_is_found(run: Run) -> None:
    """Sums of floats hang on their order; where two groups' places in the packed rows change, so
    does at least one of loss, gradient and weights, if the groups teach anything: so every batch
    is turned, for some may have equal rewards."""

    def turned(event: events.Event) -> events.Event:
        if isinstance(event, events.BatchTaken):
            return replace(event, groups=event.groups[::-1])
        return event

    rewrite_journal(run, turned)
    first = replayed(run).first_difference
    assert re.match(r"(update [1-5]|version [1-3] \(update [1-5]\)): ", first), first


def test_another_batch_is_found(run: Run) -> None:
    """Updates 3 and 5 trade their batches."""
    batches = {e.step: e.groups for e in run.told(events.BatchTaken)}

    def traded(event: events.Event) -> events.Event:
        if isinstance(event, events.BatchTaken) and event.step in (3, 5):
            return replace(event, groups=batches[8 - event.step])
        return event

    rewrite_journal(run, traded)
    assert replayed(run).first_difference.startswith("update 3: loss ")


def test_a_digest_that_is_not_the_snapshots_is_named(run: Run) -> None:
    """The journal says of version 2 what it says of version 1."""
    digests = {e.version: e.digest for e in run.told(events.VersionPublished)}

    def wrong(event: events.Event) -> events.Event:
        if isinstance(event, events.VersionPublished) and event.version == 2:
            return replace(event, digest=digests[1])
        return event

    rewrite_journal(run, wrong)
    assert replayed(run).first_difference == (
        "version 2 (update 4): the digest on record is not that of its snapshot"
    )


def test_a_missing_group_is_one_line(run: Run) -> None:
    gone = run.told(events.BatchTaken)[1].groups[1]
    rewrite_groups(run, lambda name, unit: None if name == gone else unit)
    with pytest.raises(UserError) as caught:
        replayed(run)
    assert str(caught.value) == f"the trajectory log lacks the group {gone.task}/{gone.prompt}"


def test_another_machines_numerics_are_not_compared_bit_for_bit(run: Run) -> None:
    def elsewhere(event: events.Event) -> events.Event:
        if isinstance(event, events.RunStarted):
            return replace(event, fingerprint="ab" * 32)
        return event

    rewrite_journal(run, elsewhere)
    done = replayed(run)
    assert not done.same_numerics and (done.updates, done.versions) == (5, 4)
    assert "not bit-comparable" in replaying.report(run.path, done)[0]


def test_a_run_without_an_update_says_so(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run.path / "config.toml", empty)
    log.write_format(empty)
    assert not journal.exists(empty / "journal" / "trainer")
    with pytest.raises(UserError, match="holds no journal"):
        replaying.read_recording(empty)
