"""The trajectory log: every trajectory once, whatever cuts the writing short."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.replay.events import GroupId
from rl_jax.replay.fates import OPEN, Fate, Kind
from rl_jax.replay.log import Clock, open_log
from rl_jax.replay.trajectory_log import (
    TrajectoryLog,
    open_trajectory_log,
    read_groups,
    read_trajectories,
)
from rl_jax.trajectories.types import Group, RolloutKey, Segment, Trajectory, copy_of
from tests.trajectories.build import group, same_group, same_trajectory, steady, trajectory

ROOT = Path(__file__).parents[2]
TRAINED = Fate(Kind.TRAINED, 3)
STALE = Fate(Kind.DROPPED, reason="stale")
EVALUATED = Fate(Kind.EVALUATED, 2)


def using(
    run: Path, use: Callable[[TrajectoryLog], Coroutine[Any, Any, None]], program: str = "trainer"
) -> None:
    async def main() -> None:
        log = open_trajectory_log(run, program)
        await use(log)
        await log.close()

    asyncio.run(main())


def told(run: Path) -> list[tuple[RolloutKey, Fate, str]]:
    return [(r.trajectory.key, r.fate, r.program) for r in read_trajectories(run)]


def fates(run: Path, program: str = "trainer") -> dict[int, Fate]:
    """By prompt; every group is there once."""
    pairs = [(g.prompt, fate) for g, fate in read_groups(run, program)]
    assert len({prompt for prompt, _ in pairs}) == len(pairs)
    return dict(pairs)


def names(run: Path) -> list[str]:
    found = (p.name for p in (run / "trajectories").iterdir() if p.suffix != ".lock")
    return sorted(found)


def name(prompt: int) -> GroupId:
    return GroupId("lookup", prompt)


def test_what_was_put_is_read_with_its_fate(tmp_path: Path) -> None:
    members = trajectory(0, 1.0, prompt=1), trajectory(2, 0.0, prompt=1)
    padded = Group("lookup", 1, (*members, copy_of(members[0])), ((1, "died"),))
    lone = trajectory(5, None, prompt=8, reason="tool: gone")

    async def use(log: TrajectoryLog) -> None:
        await log.put(group(0))
        await log.put(padded)
        await log.add([lone], Fate(Kind.FAILED, reason="tool: gone"))
        assert list(log.open_groups) == [name(0), name(1)]
        log.settle(name(1), TRAINED)
        log.settle(name(0), STALE)
        assert not log.open_groups

    using(tmp_path / "x", use)
    assert names(tmp_path / "x") == ["trainer-000000.array_record"]
    (first, a), (second, b) = read_groups(tmp_path / "x")
    assert same_group(first, group(0)) and a == STALE
    assert same_group(second, padded) and b == TRAINED
    recorded = list(read_trajectories(tmp_path / "x"))
    assert [r.trajectory.copy_of for r in recorded] == [None, None, None, None, 0, None]
    assert same_trajectory(recorded[-1].trajectory, lone)
    assert recorded[-1].fate == Fate(Kind.FAILED, reason="tool: gone")


def test_a_put_group_is_on_disk_when_put_returns(tmp_path: Path) -> None:
    async def use(log: TrajectoryLog) -> None:
        for prompt in range(3):
            await log.put(group(prompt))
            assert fates(tmp_path / "x") == dict.fromkeys(range(prompt + 1), OPEN)
        await log.add([trajectory(prompt=9)], EVALUATED)
        assert told(tmp_path / "x")[-1] == (RolloutKey("lookup", 9, 0), EVALUATED, "trainer")

    using(tmp_path / "x", use)


def test_an_interval_is_sealed_once_all_its_groups_have_fates(tmp_path: Path) -> None:
    run = tmp_path / "x"

    async def use(log: TrajectoryLog) -> None:
        await log.rotate()
        assert names(run) == []
        for prompt in (0, 1):
            await log.put(group(prompt))
        await log.rotate()
        await log.put(group(2))
        log.settle(name(2), TRAINED)
        log.settle(name(0), TRAINED)
        await log.rotate()
        assert names(run) == ["trainer-000000.wal", "trainer-000001.array_record"]
        await log.put(group(3))
        log.settle(name(1), STALE)
        await log.rotate()
        assert names(run) == [
            "trainer-000000.array_record",
            "trainer-000001.array_record",
            "trainer-000002.wal",
        ]

    using(run, use)
    assert fates(run) == {0: TRAINED, 1: STALE, 2: TRAINED, 3: OPEN}
    assert names(run)[-1] == "trainer-000002.wal"


def test_open_groups_come_back_and_are_settled_again(tmp_path: Path) -> None:
    run = tmp_path / "x"

    async def first(log: TrajectoryLog) -> None:
        for prompt in range(3):
            await log.put(group(prompt))
            await log.rotate()
        log.settle(name(0), TRAINED)
        log.settle(name(1), TRAINED)

    async def second(log: TrajectoryLog) -> None:
        assert list(log.open_groups) == [name(2)]
        assert same_group(log.open_groups[name(2)], group(2))
        with pytest.raises(ValueError, match="group lookup 1 cannot be trained: never put, or"):
            log.settle(name(1), TRAINED)
        await log.put(group(3))
        log.settle(name(2), STALE)
        log.settle(name(3), TRAINED)

    using(run, first)
    using(run, second)
    assert fates(run) == {0: TRAINED, 1: TRAINED, 2: STALE, 3: TRAINED}
    assert [n for n in names(run) if n.endswith(".wal")] == []


def test_programs_share_a_directory(tmp_path: Path) -> None:
    run = tmp_path / "x"

    async def use(log: TrajectoryLog) -> None:
        await log.add([trajectory(prompt=4)], EVALUATED)

    for program in ("sampler", "sampler-0", "orchestrator"):
        using(run, use, program)
        using(run, use, program)
    assert [program for _, _, program in told(run)] == [
        *["orchestrator"] * 2,
        *["sampler"] * 2,
        *["sampler-0"] * 2,
    ]
    assert names(run)[-2:] == ["sampler-000000.array_record", "sampler-000001.array_record"]


def test_sealed_comes_first(tmp_path: Path) -> None:
    async def use(log: TrajectoryLog) -> None:
        await log.put(group(0))
        await log.rotate()
        await log.put(group(1))
        log.settle(name(1), TRAINED)

    using(tmp_path / "x", use)
    assert list(fates(tmp_path / "x").items()) == [(1, TRAINED), (0, OPEN)]


def test_an_interval_may_be_sealed_while_it_is_read(tmp_path: Path) -> None:
    async def use(log: TrajectoryLog) -> None:
        await log.add([trajectory(prompt=0)], EVALUATED)
        await log.rotate()
        await log.put(group(1))
        reading = read_trajectories(tmp_path / "x")
        found = [next(reading)]
        log.settle(name(1), TRAINED)
        await log.rotate()
        found += reading
        assert [(r.trajectory.key.prompt, r.fate) for r in found] == [
            (0, EVALUATED),
            (1, TRAINED),
            (1, TRAINED),
        ]

    using(tmp_path / "x", use)


OPS = st.lists(st.sampled_from(["put", "put", "add", "settle", "rotate", "reopen"]), max_size=20)


@settings(steady, max_examples=25)
@given(OPS, st.integers(0, 7))
def test_any_sequence_records_each_once(
    tmp_path_factory: pytest.TempPathFactory, ops: list[str], pick: int
) -> None:
    run = tmp_path_factory.mktemp("runs") / "x"
    expected: dict[int, Fate] = {}

    async def main() -> None:
        log = open_trajectory_log(run, "trainer")
        for prompt, op in enumerate(ops):
            unsettled = sorted(g.prompt for g in log.open_groups)
            match op:
                case "put":
                    await log.put(group(prompt))
                    expected[prompt] = OPEN
                case "add":
                    await log.add([trajectory(prompt=prompt)], EVALUATED)
                    expected[prompt] = EVALUATED
                case "settle" if unsettled:
                    chosen = unsettled[pick % len(unsettled)]
                    log.settle(name(chosen), TRAINED)
                    expected[chosen] = TRAINED
                case "rotate":
                    await log.rotate()
                case "reopen":
                    await log.close()
                    log = open_trajectory_log(run, "trainer")
                    for known in log.open_groups:
                        if expected[known.prompt] != OPEN:
                            log.settle(known, expected[known.prompt])
            assert {r.trajectory.key.prompt for r in read_trajectories(run)} == set(expected)
        await log.close()
        last = open_trajectory_log(run, "trainer")
        assert all(expected[g.prompt] in (OPEN, TRAINED) for g in last.open_groups)
        for known in list(last.open_groups):
            last.settle(known, expected[known.prompt] if expected[known.prompt] != OPEN else STALE)
        await last.close()

    asyncio.run(main())
    found = [(key.prompt, key.sample, fate) for key, fate, _ in told(run)]
    whole = {p: STALE if fate == OPEN else fate for p, fate in expected.items()}
    samples = {p: 1 if fate == EVALUATED else 2 for p, fate in whole.items()}
    assert sorted(found) == [(p, s, whole[p]) for p in sorted(whole) for s in range(samples[p])]
    assert not [n for n in names(run) if n.endswith(".wal")]


# --- crashes -------------------------------------------------------------------------------------

# In a child for each line that sealing runs: the process is killed right before that line.
CRASHES = """
import asyncio, os, signal, sys, threading
from pathlib import Path
from rl_jax.replay.fates import Fate, Kind
from rl_jax.replay.trajectory_log import open_trajectory_log
from tests.trajectories.build import group, trajectory

def kill_at(line):
    seen = 0
    def trace(frame, what, _):
        nonlocal seen
        if frame.f_code.co_name != "_seal" or frame.f_code.co_flags & 0x80:
            return None
        if what == "line":
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
        return trace
    threading.settrace(trace)

async def main(run):
    log = open_trajectory_log(run, "trainer")
    await log.put(group(0))
    await log.add([trajectory(prompt=1)], Fate(Kind.EVALUATED, 2))
    await log.rotate()
    await log.put(group(2))
    for g in list(log.open_groups)[:1]:
        log.settle(g, Fate(Kind.TRAINED, 3))
    await log.rotate()

for line in range(100):
    child = os.fork()
    if child == 0:
        kill_at(line)
        asyncio.run(main(Path(sys.argv[1]) / str(line)))
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
    print(line)
"""


def test_a_kill_at_any_line_of_sealing_loses_and_doubles_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, tmp_path], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    runs = sorted(tmp_path.iterdir(), key=lambda p: int(p.name))
    assert len(runs) > 10 and len(done.stdout.split()) == len(runs) - 1, done.stderr.decode()
    seen: set[tuple[str, ...]] = set()
    for run in runs:
        left = names(run)
        seen.add(tuple(n.split("-")[1] for n in left))
        sealed = "trainer-000000.array_record" in left
        assert fates(run) == {0: TRAINED if sealed else OPEN, 2: OPEN}
        assert sorted(key.prompt for key, _, _ in told(run)) == [0, 0, 1, 2, 2]

        async def use(log: TrajectoryLog, sealed: bool = sealed) -> None:
            assert set(log.open_groups) == {name(2)} | (set() if sealed else {name(0)})
            for known in list(log.open_groups):
                log.settle(known, TRAINED)

        using(run, use)
        assert names(run) == ["trainer-000000.array_record", "trainer-000001.array_record"]
        assert told(run) == [
            *[(RolloutKey("lookup", 0, s), TRAINED, "trainer") for s in (0, 1)],
            (RolloutKey("lookup", 1, 0), EVALUATED, "trainer"),
            *[(RolloutKey("lookup", 2, s), TRAINED, "trainer") for s in (0, 1)],
        ]
    assert seen == {
        ("000000.wal", "000001.wal"),
        ("000000.partial", "000000.wal", "000001.wal"),
        ("000000.array_record", "000000.wal", "000001.wal"),
        ("000000.array_record", "000001.wal"),
    }


def test_a_cut_tail_is_truncated_on_open(tmp_path: Path) -> None:
    run = tmp_path / "x"
    sizes: list[int] = []

    async def write(log: TrajectoryLog) -> None:
        for prompt in range(2):
            await log.put(group(prompt))
            sizes.append((run / "trajectories" / "trainer-000000.wal").stat().st_size)

    async def look(log: TrajectoryLog) -> None:
        assert list(log.open_groups) == ([name(0)] if whole else [])

    using(run, write)
    wal = run / "trajectories" / "trainer-000000.wal"
    data = wal.read_bytes()
    for end in (*range(20), sizes[0] - 1, *range(sizes[0], sizes[1], 7), sizes[1] - 1):
        whole = end >= sizes[0]
        wal.write_bytes(data[:end])
        assert fates(run) == ({0: OPEN} if whole else {})
        assert wal.stat().st_size == end  # reading changes nothing
        using(run, look)
        assert names(run) == (["trainer-000000.wal"] if whole else [])
        assert not whole or wal.stat().st_size == sizes[0]


def test_damage_before_the_tail_is_an_error(tmp_path: Path) -> None:
    async def write(log: TrajectoryLog) -> None:
        await log.put(group(0))
        await log.put(group(1))

    using(tmp_path / "x", write)
    wal = tmp_path / "x" / "trajectories" / "trainer-000000.wal"
    data = bytearray(wal.read_bytes())
    data[30] ^= 1
    wal.write_bytes(data)
    for use in (
        lambda: open_trajectory_log(tmp_path / "x", "trainer"),
        lambda: told(wal.parents[1]),
    ):
        with pytest.raises(ValueError, match=r"trainer-000000\.wal is corrupt at byte 0"):
            use()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_sealed_interval_is_an_error(tmp_path: Path, damage: str) -> None:
    async def write(log: TrajectoryLog) -> None:
        await log.add([trajectory(prompt=p) for p in range(9)], EVALUATED)

    using(tmp_path / "x", write)
    sealed = tmp_path / "x" / "trajectories" / "trainer-000000.array_record"
    data = bytearray(sealed.read_bytes())
    data[200] ^= 0xFF
    sealed.write_bytes({"cut": data[:70_000], "flip": data, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"trainer-000000\.array_record is corrupt"):
        told(tmp_path / "x")


# --- a full disk ---------------------------------------------------------------------------------


async def fails(awaited: Coroutine[Any, Any, None], file: str) -> None:
    with pytest.raises(OSError, match=rf"{file} cannot be written .*No space left") as caught:
        await awaited
    assert "\n" not in str(caught.value)


async def fails_for_good(log: TrajectoryLog, file: str) -> None:
    await fails(log.put(group(7)), file)
    await fails(log.add([trajectory()], EVALUATED), file)
    await fails(log.rotate(), file)
    await fails(log.close(), file)


def test_a_full_disk_fails_this_and_every_later_call(tmp_path: Path) -> None:
    async def main() -> None:
        log = open_trajectory_log(tmp_path / "x", "trainer")
        (tmp_path / "x" / "trajectories" / "trainer-000000.wal").symlink_to("/dev/full")
        await fails(log.put(group(0)), r"trainer-000000\.wal")
        await fails_for_good(log, r"trainer-000000\.wal")

    asyncio.run(main())


def test_a_disk_that_is_full_when_sealing_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "x"

    async def main() -> None:
        log = open_trajectory_log(run, "trainer")
        await log.put(group(0))
        log.settle(name(0), TRAINED)
        (run / "trajectories" / "trainer-000000.partial").symlink_to("/dev/full")
        await fails(log.rotate(), r"trainer-000000\.array_record")
        await fails_for_good(log, r"trainer-000000\.array_record")

    asyncio.run(main())
    assert fates(run) == {0: OPEN}

    async def again(log: TrajectoryLog) -> None:
        log.settle(name(0), TRAINED)

    using(run, again)
    assert fates(run) == {0: TRAINED}


# --- what is refused -----------------------------------------------------------------------------


def test_a_group_has_one_fate(tmp_path: Path) -> None:
    async def use(log: TrajectoryLog) -> None:
        await log.put(group(0))
        await log.put(group(1))
        with pytest.raises(ValueError, match="lookup 0 is in the trajectory log already"):
            await log.put(group(0))
        with pytest.raises(ValueError, match="lookup 5 cannot be trained: never put"):
            log.settle(name(5), TRAINED)
        with pytest.raises(ValueError, match="open is no fate"):
            log.settle(name(0), OPEN)
        log.settle(name(0), TRAINED)
        with pytest.raises(ValueError, match=r"lookup 0 cannot be dropped: .* settled"):
            log.settle(name(0), STALE)
        with pytest.raises(ValueError, match="lookup 0 is in the trajectory log already"):
            await log.put(group(0))

        log.settle(name(1), STALE)

    using(tmp_path / "x", use)
    assert fates(tmp_path / "x") == {0: TRAINED, 1: STALE}


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    async def use(log: TrajectoryLog) -> None:
        with pytest.raises(ValueError, match="written by another process"):
            open_trajectory_log(tmp_path / "x", "trainer")

    using(tmp_path / "x", use)
    using(tmp_path / "x", lambda log: asyncio.sleep(0))


def test_a_run_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x" / "journal").mkdir(parents=True)
    for use in (
        lambda: open_trajectory_log(tmp_path / "x", "trainer"),
        lambda: told(tmp_path / "x"),
    ):
        with pytest.raises(ValueError, match="x: a run of format 1"):
            use()


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        log = open_trajectory_log(tmp_path / "x", "trainer")
        await log.close()
        with pytest.raises(ValueError, match="closed"):
            await log.put(group(0))

    asyncio.run(main())


def test_a_directory_serves_both_records(tmp_path: Path) -> None:
    async def main() -> None:
        trajectories = open_trajectory_log(tmp_path / "x", "trainer")
        events = open_log(tmp_path / "x", "trainer", Clock())
        await trajectories.close()
        await events.close()

    asyncio.run(main())


# --- what it costs -------------------------------------------------------------------------------


def agent(prompt: int, sample: int, n: int, turns: int) -> Trajectory:
    """n tokens: in each turn half are a tool's and half are sampled."""
    base = trajectory(sample, prompt=prompt, versions=(3,) * (n - 1))
    half = n // turns // 2
    mask = np.arange(n) // half % 2 == 1
    chance = np.random.default_rng([prompt, sample])
    return Trajectory(
        key=base.key,
        tokens=chance.integers(0, 200, n).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -chance.random(n).astype(np.float32), np.float32(0)),
        versions=np.where(mask, np.int32(3), np.int32(-1)),
        segments=tuple(
            Segment(t * half, (t + 1) * half, 3, base.segments[0].origin) for t in range(2 * turns)
        ),
        temperature=1.0,
        reward=base.reward,
        status=base.status,
        turns=turns,
    )


@pytest.mark.parametrize(("n", "turns", "most"), [(40, 2, 16.0), (500, 10, 8.0)])
def test_bytes_and_time(tmp_path: Path, n: int, turns: int, most: float) -> None:
    run = tmp_path / "x"
    made = [Group("lookup", p, tuple(agent(p, s, n, turns) for s in range(16))) for p in range(63)]
    sizes: list[int] = []

    async def use(log: TrajectoryLog) -> None:
        for g in made:
            await log.put(g)
            log.settle(name(g.prompt), TRAINED)
        sizes.append((run / "trajectories" / "trainer-000000.wal").stat().st_size)

    began = time.process_time()
    using(run, use)
    assert time.process_time() - began < 2.0
    sizes.append((run / "trajectories" / "trainer-000000.array_record").stat().st_size)
    tokens = 63 * 16 * n
    assert max(sizes) <= most * tokens, [size / tokens for size in sizes]
    assert all(map(same_group, (g for g, _ in read_groups(run)), made))


def test_the_loop_stays_free_while_the_disk_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        busy, release = asyncio.Event(), asyncio.Event()
        real = os.fsync

        def fsync(descriptor: int) -> None:
            loop.call_soon_threadsafe(busy.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
            real(descriptor)

        log = open_trajectory_log(tmp_path / "x", "trainer")
        monkeypatch.setattr("os.fsync", fsync)
        put = asyncio.create_task(log.put(group(0)))
        await asyncio.wait_for(busy.wait(), 20)
        assert not put.done()
        log.settle(name(0), TRAINED)
        rotate = asyncio.create_task(log.rotate())
        release.set()
        await asyncio.wait_for(asyncio.gather(put, rotate), 20)
        await log.close()

    asyncio.run(main())
    assert fates(tmp_path / "x") == {0: TRAINED}
