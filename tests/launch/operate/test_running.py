"""Who runs a run: known while it lives, and never taken for another."""

import asyncio
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch.operate import running
from launch.operate.running import Runner, of_process, recorded, runner
from launch.report.data import RUNNING, is_running
from rl_jax.config.base import UserError
from rl_jax.replay.log import Clock, open_log
from rl_jax.replay.records import lock


def test_known_while_it_lives(run: Path, start) -> None:
    assert runner(run) is None and not is_running(run)
    process = start("stops")
    who = runner(run)
    assert who == of_process(process.pid) and who is not None and who.here and who.lives()
    assert is_running(run)
    with pytest.raises(UserError, match="is run by another process"), recorded(run):
        pass
    assert runner(run) == who, "who asked took nothing away"
    assert who.send(signal.SIGTERM)
    assert process.wait() == 0
    assert runner(run) is None and not (run / RUNNING).exists() and not is_running(run)
    assert not who.send(signal.SIGKILL)


def test_what_a_killed_process_left_names_nobody(run: Path, start) -> None:
    process = start("stops")
    who = runner(run)
    process.kill()
    assert who is not None and not _until_dead(process) and not who.lives()
    assert (run / RUNNING).is_file() and runner(run) is None and not is_running(run)
    with recorded(run):
        assert runner(run) == of_process(os.getpid())


def test_a_writer_is_known_without_locks_of_directories(run: Path, monkeypatch) -> None:
    """As on NFS, where another host sees those of regular files alone."""
    flock = fcntl.flock

    def forwarded(descriptor: int, operation: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            flock(descriptor, operation)

    async def main() -> None:
        log = open_log(run, "trainer", Clock())
        assert is_running(run)
        with pytest.raises(ValueError, match="is being written by another process"):
            open_log(run, "trainer", Clock())
        await log.close()

    monkeypatch.setattr(fcntl, "flock", forwarded)
    asyncio.run(main())
    assert not is_running(run)


def _until_dead(process: subprocess.Popen[str]) -> bool:
    """False when it is over, though nobody has asked for its status yet."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.returncode is not None


def test_a_file_that_its_holder_took_away_while_it_was_waited_for(run: Path, monkeypatch) -> None:
    """The first lock is one of a file that is no more there."""
    taken: list[int] = []

    def late(path: Path) -> int:
        descriptor = lock(path)
        if not taken:
            path.unlink()
            taken.append(descriptor)
        return descriptor

    monkeypatch.setattr(running, "lock", late)
    with recorded(run):
        assert taken and runner(run) == of_process(os.getpid())


def test_another_process_of_the_same_number_gets_no_signal() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = of_process(process.pid)
    older = Runner(who.pid, who.host, who.born - 1)
    assert not older.lives() and not older.send(signal.SIGKILL)
    process.communicate(b"\n")
    assert process.returncode == 0


def test_a_crash_is_kept_where_the_run_had_begun(run: Path) -> None:
    def crash() -> None:
        with recorded(run):
            raise ValueError("the seventh seal")

    with pytest.raises(ValueError, match="seal"):
        crash()
    assert not (run / "logs").exists()
    (run / "journal").mkdir()
    with pytest.raises(ValueError, match="seal"):
        crash()
    assert (run / "logs" / "run-0.log").read_text().endswith("ValueError: the seventh seal\n")
