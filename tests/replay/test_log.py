"""A run's journals: what each program says, in an order in which no effect precedes its cause."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_jax.replay import journal
from rl_jax.replay.events import (
    Event,
    GroupId,
    GroupPut,
    RolloutStarted,
    UpdateDone,
    VersionApplied,
    VersionPublished,
)
from rl_jax.replay.log import (
    Clock,
    Entry,
    check_format,
    decode_entry,
    encode_entry,
    merged,
    open_log,
    prepare,
    read,
)
from rl_jax.replay.records import encode_record
from rl_jax.trajectories.types import RolloutKey

SHA = "9f" * 32


def write(run_dir: Path, program: str, *events: Event, clock: Clock | None = None) -> None:
    async def main() -> None:
        log = open_log(run_dir, program, clock or Clock())
        for event in events:
            await log.append(event)
        await log.close()

    asyncio.run(main())


def done(step: int) -> UpdateDone:
    return UpdateDone(step, 0.5, 1.0)


def test_golden_bytes(tmp_path: Path) -> None:
    run = tmp_path / "x"
    write(run, "trainer", VersionPublished(3, SHA, 12))
    assert (run / "FORMAT").read_text() == "rl_jax run 2\n"
    # A map of 4, an array of 3, 32 bytes; the CRC-32 is of the journal's own test.
    payload = b"\x84\xa4kind\xb1version_published\xa5clock\x01\xa3seq\x00\xa1v\x93\x03\xc4\x20"
    data = (run / "journal" / "trainer" / "000000.journal").read_bytes()
    assert data[8:] == payload + b"\x9f" * 32 + b"\x0c"


def test_an_entry_survives_its_record() -> None:
    entry = Entry(7, "sampler-3", 2, VersionApplied(1, 0.25))
    plain = encode_entry(entry)
    assert list(plain) == ["kind", "clock", "seq", "v"]
    assert decode_entry("sampler-3", plain) == entry


def test_reopening_goes_on_with_sequence_and_clock(tmp_path: Path) -> None:
    run = tmp_path / "x"
    early = Clock()
    early.witness(40)
    write(run, "trainer", done(1), done(2), clock=early)
    clock = Clock()
    write(run, "trainer", done(3), clock=clock)
    assert list(read(run, "trainer")) == [
        Entry(41, "trainer", 0, done(1)),
        Entry(42, "trainer", 1, done(2)),
        Entry(43, "trainer", 2, done(3)),
    ]
    assert clock.now == 43


def test_a_cut_entry_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    run = tmp_path / "x"
    write(run, "trainer", done(1), done(2))
    segment = run / "journal" / "trainer" / "000000.journal"
    segment.write_bytes(segment.read_bytes()[:-1])
    write(run, "trainer", done(3))
    assert [(e.sequence, e.event) for e in read(run, "trainer")] == [(0, done(1)), (1, done(3))]


def test_a_directory_left_before_its_first_segment_is_gone_on_with(tmp_path: Path) -> None:
    run = tmp_path / "x"
    prepare(run)
    (run / "journal" / "trainer").mkdir(parents=True)
    assert list(merged(run)) == []
    write(run, "trainer", done(1))
    assert [e.event for e in merged(run)] == [done(1)]


class Program:
    """A program of a process of its own, that others send messages to."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.clock = Clock()
        self.log = open_log(run_dir, name, self.clock)
        self.inbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

    async def hear(self) -> Any:
        clock, what = await asyncio.wait_for(self.inbox.get(), 10)
        self.clock.witness(clock)
        return what

    def tell(self, other: "Program", what: Any) -> None:
        other.inbox.put_nowait((self.clock.now, what))


def test_the_order_of_a_run_respects_causality(tmp_path: Path) -> None:
    """The orchestrator is far ahead in its own clock; each group causes an update and a version,
    and the version is applied by a sampler that has written nothing so far."""
    run = tmp_path / "x"
    rounds = 5

    async def orchestrator(me: Program, trainer: Program) -> None:
        for r in range(rounds):
            for sample in range(7):
                await me.log.append(RolloutStarted(RolloutKey("t", r, sample)))
            me.tell(trainer, r)

    async def trainer(me: Program, sampler: Program) -> None:
        for _ in range(rounds):
            prompt = await me.hear()
            await me.log.append(GroupPut(GroupId("t", prompt), 0, 9))
            await me.log.append(VersionPublished(prompt, SHA, prompt))
            me.tell(sampler, prompt)

    async def sampler(me: Program) -> None:
        for _ in range(rounds):
            await me.log.append(VersionApplied(await me.hear(), 0.0))

    async def main() -> None:
        o, t, s = (Program(run, name) for name in ("orchestrator", "trainer", "sampler-0"))
        await asyncio.gather(orchestrator(o, t), trainer(t, s), sampler(s))
        for program in (o, t, s):
            await program.log.close()

    asyncio.run(main())
    entries = list(merged(run))
    assert len(entries) == rounds * (7 + 2 + 1)
    assert entries == sorted(entries, key=lambda e: (e.clock, e.program, e.sequence))
    at = {entry.event: i for i, entry in enumerate(entries)}
    for r in range(rounds):
        chain: list[Event] = [
            RolloutStarted(RolloutKey("t", r, 0)),
            RolloutStarted(RolloutKey("t", r, 6)),
            GroupPut(GroupId("t", r), 0, 9),
            VersionPublished(r, SHA, r),
            VersionApplied(r, 0.0),
        ]
        places = [at[event] for event in chain]
        assert places == sorted(places)
    for program in ("orchestrator", "trainer", "sampler-0"):
        mine = [e.sequence for e in entries if e.program == program]
        assert mine == list(range(len(mine)))


def test_programs_of_one_process_share_a_clock(tmp_path: Path) -> None:
    run = tmp_path / "x"

    async def main() -> None:
        clock = Clock()
        logs = [open_log(run, name, clock) for name in ("trainer", "orchestrator")]
        for step in range(6):
            _ = logs[step % 2].append(done(step))
        for log in logs:
            await log.close()

    asyncio.run(main())
    assert [e.event for e in merged(run)] == [done(step) for step in range(6)]


def test_a_run_is_readable_while_it_is_written(tmp_path: Path) -> None:
    run = tmp_path / "x"

    async def main() -> None:
        log = open_log(run, "trainer", Clock())
        for step in range(3):
            await log.append(done(step))
            assert [e.event for e in merged(run)] == [done(s) for s in range(step + 1)]
        await log.close()

    asyncio.run(main())


# --- what is refused -----------------------------------------------------------------------------


async def opened(run_dir: Path) -> None:
    await open_log(run_dir, "trainer", Clock()).close()


USES: list[Callable[[Path], object]] = [
    check_format,
    lambda run: list(merged(run)),
    lambda run: list(read(run, "trainer")),
    lambda run: asyncio.run(opened(run)),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("text", "number"),
    [(None, r"1 \(or unknown\)"), ("rl_jax run 3\n", "3"), ("\0\0", r"1 \(or unknown\)")],
)
def test_another_format_is_refused(
    tmp_path: Path, use: Callable[[Path], object], text: str | None, number: str
) -> None:
    run = tmp_path / "x"
    (run / "journal").mkdir(parents=True)
    (run / "journal" / "000000.journal").write_bytes(encode_record({"kind": "run_started"}))
    if text is not None:
        (run / "FORMAT").write_text(text)
    said = rf"x: a run of format {number}; this version reads format 2$"
    with pytest.raises(ValueError, match=said):
        use(run)


@pytest.mark.parametrize("program", ["Trainer", "trainer/..", "", "sampler-", "sampler-x"])
def test_an_unknown_program_is_refused(tmp_path: Path, program: str) -> None:
    prepare(tmp_path / "x")
    with pytest.raises(ValueError, match="no program"):
        open_log(tmp_path / "x", program, Clock())


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"kind": "run_ended", "clock": 5, "seq": 2, "v": ["stopped"]}, "entry 2 at clock 5"),
        ({"kind": "run_ended", "clock": 1, "seq": 1, "v": ["stopped"]}, "entry 1 at clock 1"),
        ({"kind": "run_ended", "clock": 5, "v": ["stopped"]}, "entry 1: seq is None"),
        ({"kind": "run_ended", "clock": -1, "seq": 1, "v": ["stopped"]}, "entry 1: clock is -1"),
        ({"kind": "run_ended", "clock": 5, "seq": 1, "v": [3]}, "entry 1: run_ended: reason: 3"),
    ],
)
def test_an_entry_out_of_order_is_named(tmp_path: Path, second: dict, said: str) -> None:
    run = tmp_path / "x"
    write(run, "trainer", done(1))

    async def main() -> None:
        log, _ = journal.reopen(run / "journal" / "trainer")
        await log.append(second)
        await log.close()

    asyncio.run(main())
    with pytest.raises(ValueError, match=said) as caught:
        list(merged(run))
    assert "trainer" in str(caught.value) and "\n" not in str(caught.value)


def test_a_program_has_one_writer(tmp_path: Path) -> None:
    async def main() -> None:
        log = open_log(tmp_path / "x", "trainer", Clock())
        with pytest.raises(ValueError, match="written by another process"):
            open_log(tmp_path / "x", "trainer", Clock())
        await log.close()
        await opened(tmp_path / "x")

    asyncio.run(main())


def test_a_failed_write_fails_this_and_every_later_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        log = open_log(tmp_path / "x", "trainer", Clock())
        monkeypatch.setattr("os.fsync", fsync)
        for step in range(2):
            with pytest.raises(OSError, match=r"000000\.journal cannot be written .*No space"):
                await log.append(done(step))
        with pytest.raises(OSError, match="No space"):
            await log.close()

    asyncio.run(main())
