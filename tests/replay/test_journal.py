"""The journal: what is answered is on disk, and no damage goes unnoticed."""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.replay import records as module
from rl_jax.replay.journal import create, read, reopen
from rl_jax.replay.records import encode_record
from tests.trajectories.build import steady

ROOT = Path(__file__).parents[2]
SEGMENT = "000000.journal"


def event(i: int, size: int = 0) -> dict:
    return {"kind": "e", "i": i, "pad": b"x" * size}


def numbers(path: Path) -> list[int]:
    return [e["i"] for e in read(path)]


def write(path: Path, *events: dict, segment_bytes: int = 1 << 20) -> None:
    async def main() -> None:
        journal = create(path, segment_bytes=segment_bytes)
        for e in events:
            await journal.append(e)
        await journal.close()

    asyncio.run(main())


def append(path: Path, *events: dict, segment_bytes: int = 1 << 20) -> int:
    async def main() -> int:
        journal, cut = reopen(path, segment_bytes=segment_bytes)
        for e in events:
            await journal.append(e)
        await journal.close()
        return cut

    return asyncio.run(main())


def test_golden_bytes(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "version_published", "version": 3, "digest": "ab", "step": 12})
    # A map of 4; then the CRC-32 of IEEE 802.3, computed bit by bit.
    payload = b"\x84\xa4kind\xb1version_published\xa7version\x03\xa6digest\xa2ab\xa4step\x0c"
    assert (tmp_path / SEGMENT).read_bytes() == b"\x31\0\0\0" + b"\x52\xd3\x9c\x5f" + payload


@settings(steady, max_examples=25)
@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.binary(max_size=40))))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, values: list[dict]) -> None:
    path = tmp_path_factory.mktemp("journal")
    events = [{"kind": "e", "value": value} for value in values]
    write(path, *events, segment_bytes=100)
    assert list(read(path)) == events


def test_appends_keep_the_order_of_the_calls(tmp_path: Path) -> None:
    async def main() -> None:
        journal = create(tmp_path)
        await asyncio.gather(*(journal.append(event(i)) for i in range(500)))
        await journal.close()

    asyncio.run(main())
    assert numbers(tmp_path) == list(range(500))


class Gate:
    """Counts fsyncs of the journal's file, and holds each until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.entered = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        real = os.fsync

        def fsync(descriptor: int) -> None:
            self.calls += 1
            self.entered.release()
            assert self.open.acquire(timeout=20)
            real(descriptor)

        self.install = lambda: monkeypatch.setattr(module.os, "fsync", fsync)


def test_concurrent_appends_share_an_fsync_and_the_loop_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        journal = create(tmp_path)
        gate.install()
        first = journal.append(event(0))
        await asyncio.to_thread(gate.entered.acquire)  # the loop runs while the disk is busy
        rest = [journal.append(event(i)) for i in range(1, 101)]
        assert not first.done()
        gate.open.release()
        await first
        await asyncio.to_thread(gate.entered.acquire)
        assert not any(f.done() for f in rest)
        gate.open.release()
        await asyncio.gather(*rest)
        await journal.close()

    asyncio.run(main())
    assert gate.calls == 2
    assert numbers(tmp_path) == list(range(101))


def test_an_answered_record_is_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        journal = create(tmp_path)
        for i in range(5):
            await journal.append(event(i))
            assert numbers(tmp_path) == list(range(i + 1))
        await journal.close()

    asyncio.run(main())


def test_close_writes_what_nobody_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        journal = create(tmp_path)
        for i in range(3):
            _ = journal.append(event(i))
        await journal.close()
        with pytest.raises(ValueError, match="closed"):
            _ = journal.append(event(3))

    asyncio.run(main())
    assert numbers(tmp_path) == [0, 1, 2]


def test_a_failed_write_fails_every_append_in_line_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        journal = create(tmp_path)
        monkeypatch.setattr(module.os, "fsync", fsync)
        line = [journal.append(event(i)) for i in range(3)]
        for future in line:
            with pytest.raises(OSError, match=r"cannot be written .*No space left"):
                await future
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            await journal.append(event(3))
        with pytest.raises(OSError, match="No space left"):
            await journal.close()

    asyncio.run(main())


def test_a_disk_that_never_answers_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)

    async def main() -> None:
        journal = create(tmp_path, timeout=0.01)
        gate.install()
        with pytest.raises(OSError, match=r"cannot be written .TimeoutError"):
            await journal.append(event(0))
        gate.open.release()
        with pytest.raises(OSError, match="TimeoutError"):
            await journal.close()

    asyncio.run(main())


# --- segments ------------------------------------------------------------------------------------


def test_segments_rotate_and_no_record_is_split(tmp_path: Path) -> None:
    record = len(encode_record(event(0, 50)))
    write(tmp_path, *(event(i, 50) for i in range(7)), segment_bytes=3 * record)
    sizes = [p.stat().st_size // record for p in sorted(tmp_path.glob("*.journal"))]
    assert sizes == [3, 3, 1]
    assert numbers(tmp_path) == list(range(7))


def test_a_record_above_the_segment_size_has_one_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, event(0), event(1, 500), event(2), segment_bytes=100)
    assert [p.name for p in sorted(tmp_path.glob("*.journal"))] == [
        f"00000{i}.journal" for i in range(3)
    ]
    assert numbers(tmp_path) == [0, 1, 2]


def test_one_batch_may_span_segments(tmp_path: Path) -> None:
    async def main() -> None:
        journal = create(tmp_path, segment_bytes=200)
        await asyncio.gather(*(journal.append(event(i, 50)) for i in range(20)))
        await journal.close()

    asyncio.run(main())
    assert len(list(tmp_path.glob("*.journal"))) > 5
    assert numbers(tmp_path) == list(range(20))


def test_reopening_goes_on_in_the_last_segment(tmp_path: Path) -> None:
    record = len(encode_record(event(0)))
    write(tmp_path, event(0), event(1), event(2), segment_bytes=2 * record)
    assert append(tmp_path, event(3), event(4), segment_bytes=2 * record) == 0
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    assert len(list(tmp_path.glob("*.journal"))) == 3


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    write(tmp_path, *map(event, range(3)), segment_bytes=1)
    (tmp_path / "000001.journal").unlink()
    with pytest.raises(ValueError, match=r"000001\.journal is missing"):
        numbers(tmp_path)


# --- damage --------------------------------------------------------------------------------------


def test_a_tail_cut_at_any_byte_is_truncated_and_reported(tmp_path: Path) -> None:
    write(tmp_path, event(0), event(1), event(2, 30))
    segment = tmp_path / SEGMENT
    whole = segment.read_bytes()
    start = len(whole) - len(encode_record(event(2, 30)))
    for end in range(start, len(whole)):
        segment.write_bytes(whole[:end])
        assert numbers(tmp_path) == [0, 1]
        assert segment.read_bytes() == whole[:end]  # reading changes nothing
        assert append(tmp_path, event(9)) == end - start
        assert numbers(tmp_path) == [0, 1, 9]


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\0" * 3, b"\xff" * 64, b"\x84\xa4kind" * 9])
def test_a_tail_of_garbage_is_truncated(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, event(0))
    with (tmp_path / SEGMENT).open("ab") as file:
        file.write(tail)
    assert append(tmp_path, event(1)) == len(tail)
    assert numbers(tmp_path) == [0, 1]


def test_any_flipped_byte_before_the_last_record_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, *(event(i, 5) for i in range(3)))
    segment = tmp_path / SEGMENT
    whole = segment.read_bytes()
    record = len(whole) // 3
    for at in range(2 * record):
        damaged = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        segment.write_bytes(damaged)
        said = rf"{SEGMENT} is corrupt at byte {at // record * record}:"
        with pytest.raises(ValueError, match=said):
            numbers(tmp_path)
        with pytest.raises(ValueError, match=said):
            reopen(tmp_path)
        assert segment.read_bytes() == damaged  # refused means untouched


def test_any_flipped_byte_of_the_last_record_costs_that_record(tmp_path: Path) -> None:
    write(tmp_path, *(event(i, 5) for i in range(3)))
    segment = tmp_path / SEGMENT
    whole = segment.read_bytes()
    record = len(whole) // 3
    for at in range(2 * record, 3 * record):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        assert append(tmp_path) == record
        assert numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_an_earlier_segment_has_no_tail_to_cut(tmp_path: Path, damage: str) -> None:
    write(tmp_path, event(0), event(1), segment_bytes=1)
    segment = tmp_path / SEGMENT
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1] if damage == "cut" else whole[:-1] + b"?")
    with pytest.raises(ValueError, match=r"000000\.journal is corrupt at byte 0"):
        reopen(tmp_path)


def test_damage_is_found_before_map_headers_of_every_size(tmp_path: Path) -> None:
    for i, keys in enumerate((1, 20, 70_000)):
        path = tmp_path / str(i)
        wide = {"kind": "e", "i": i} | {f"k{k}": 0 for k in range(keys)}
        write(path, event(0), wide, segment_bytes=1 << 30)
        segment = path / SEGMENT
        segment.write_bytes(b"\xff" + segment.read_bytes()[1:])
        with pytest.raises(ValueError, match="corrupt at byte 0"):
            numbers(path)


def test_a_checksum_that_fits_a_broken_length_is_still_bounded(tmp_path: Path) -> None:
    tmp_path.joinpath(SEGMENT).write_bytes(struct.pack("<II", 0xFFFFFFFF, 0) + b"x" * 20)
    assert append(tmp_path, event(0)) == 28


# --- who may write -------------------------------------------------------------------------------


def test_a_journal_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path, event(0))
    with pytest.raises(ValueError, match="holds a journal already"):
        create(tmp_path)
    assert numbers(tmp_path) == [0]


@pytest.mark.parametrize("use", [reopen, numbers])
def test_no_journal_is_an_error(tmp_path: Path, use) -> None:
    with pytest.raises(ValueError, match="holds no journal"):
        use(tmp_path / "nothing")


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    async def main() -> None:
        journal = create(tmp_path)
        await journal.append(event(0))
        with pytest.raises(ValueError, match="written by another process"):
            reopen(tmp_path)
        await journal.close()
        again, _ = reopen(tmp_path)
        await again.close()

    asyncio.run(main())


@pytest.mark.parametrize("bad", [{}, {"i": 0, "kind": "e"}])
def test_kind_must_come_first(bad: dict) -> None:
    with pytest.raises(ValueError, match="begins with its kind"):
        encode_record(bad)


def test_a_record_above_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORD", 100)
    with pytest.raises(ValueError, match="at most 100"):
        encode_record(event(0, 200))


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from rl_jax.replay.journal import create

async def main():
    journal = create(Path(sys.argv[1]), segment_bytes=2000)
    async def one(i):
        await journal.append({"kind": "e", "i": i, "pad": b"x" * 50})
        os.write(1, f"{i}\\n".encode())
        if i == 200:
            os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.gather(*(one(i) for i in range(150)))
    await asyncio.gather(*(one(i) for i in range(150, 1000)))

asyncio.run(main())
"""


def test_everything_answered_before_a_kill_is_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    answered = list(map(int, done.stdout.split()))
    assert answered[-1] == 200
    append(tmp_path, event(5000))
    found = numbers(tmp_path)
    assert found[: len(answered)] == answered
    assert found == [*range(len(found) - 1), 5000]


def test_reading_unpacks_like_msgpack(tmp_path: Path) -> None:
    events = [{"kind": "e", "f": 0.1, "n": None, "l": [1, [2]], "t": "é", "m": {"a": True}}]
    write(tmp_path, *events)
    assert list(read(tmp_path)) == events == [msgpack.unpackb(msgpack.packb(events[0]))]
