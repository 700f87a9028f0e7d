"""[H] Roles are kept alive, given up and ended: real processes, real signals."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch.engine.base import GroupSpec, ProcessEvent, ProcessSpec, Resources
from launch.engine.local import LocalEngine, LocalGroup
from launch.supervisor import Restart, Role, RoleFailed, Supervisor
from rl_jax.config.base import UserError
from tests.fakes.processes import Pipe, Watched
from tests.fakes.role import ENV, PAUSE, deaf, group, script

LONG = 60.0
NEVER = Restart(max_restarts=0, window_s=60.0, backoff_s=0.0)
AT_ONCE = Restart(max_restarts=3, window_s=60.0, backoff_s=0.0)


class Told(list[tuple[Any, ...]]):
    """What the callbacks were told: (role, "started", pid), (role, code), (role, "lost", why)."""

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_started": lambda role, pid: self.append((role, "started", pid)),
            "on_ended": lambda role, pid, code: self.append((role, code)),
            "on_lost": lambda role, why: self.append((role, "lost", why)),
        }

    def codes(self, role: str) -> list[int]:
        return [entry[1] for entry in self if entry[0] == role and len(entry) == 2]


def role(
    name: str,
    *processes: ProcessSpec,
    restart: Restart = NEVER,
    essential: bool = True,
    ends_run: bool = False,
) -> Role:
    return Role(name, lambda _: group(name, *processes), restart, essential, ends_run)


def until(pipe: Pipe) -> ProcessSpec:
    """Exits with 0 once the pipe is told something."""
    return script("import sys; open(sys.argv[1]).read(1)", pipe.path)


def run(engine: LocalEngine, body: Any) -> Any:
    async def main() -> Any:
        try:
            async with asyncio.timeout(LONG):
                return await body
        finally:
            await engine.close()

    return asyncio.run(main())


def test_a_run_ends_with_the_roles_that_end_it(tmp_path: Path) -> None:
    """Both of them; the sampler is then ended by TERM."""
    engine, told, pipe = LocalEngine(tmp_path), Told(), Pipe(tmp_path / "pipe")
    second = role("second", until(pipe), ends_run=True)
    roles = [role("first", script(""), ends_run=True), role("sampler", PAUSE), second]

    def on_ended(name: str, pid: int, code: int) -> None:
        told.append((name, code))
        if name == "first":
            pipe.tell()

    supervisor = Supervisor(engine, roles, **{**told.callbacks(), "on_ended": on_ended})
    assert run(engine, supervisor.run()) is True
    assert [entry for entry in told if len(entry) == 2] == [
        ("first", 0),
        ("second", 0),
        ("sampler", -signal.SIGTERM),
    ]


def test_a_killed_role_is_started_again(tmp_path: Path) -> None:
    """SIGKILL to the sampler's first two lives; its third one ends the run."""
    engine, told, attempts = LocalEngine(tmp_path), Told(), list[int]()
    pipe = Pipe(tmp_path / "pipe")

    def spec(attempt: int) -> GroupSpec:
        attempts.append(attempt)
        return group("sampler", PAUSE)

    def on_started(name: str, pid: int) -> None:
        told.append((name, "started", pid))
        if name == "sampler" and len(attempts) < 3:
            os.kill(pid, signal.SIGKILL)
        elif name == "sampler":
            pipe.tell()

    roles = [
        role("trainer", until(pipe), ends_run=True),
        Role("sampler", spec, AT_ONCE, True, False),
    ]
    supervisor = Supervisor(engine, roles, **{**told.callbacks(), "on_started": on_started})
    assert run(engine, supervisor.run()) is True
    assert attempts == [0, 1, 2]
    assert told.codes("sampler") == [-signal.SIGKILL, -signal.SIGKILL, -signal.SIGTERM]
    assert len({entry[2] for entry in told if entry[:2] == ("sampler", "started")}) == 3


def test_beyond_its_restarts_a_role_ends_the_run(tmp_path: Path) -> None:
    engine, told = LocalEngine(tmp_path), Told()
    code = "for i in range(30): print('line', i)\nprint()\nraise SystemExit(3)"
    roles = [
        role("trainer", PAUSE, ends_run=True),
        role("sampler", script(code), restart=Restart(2, 60.0, 0.0)),
    ]
    with pytest.raises(RoleFailed) as caught:
        run(engine, Supervisor(engine, roles, **told.callbacks()).run())
    line, *tail = str(caught.value).splitlines()
    log = tmp_path / "logs" / "sampler-0.log"
    assert line.startswith("sampler: process 0 (pid ")
    assert line.endswith(f") exited with 3, after 2 restarts within 60 s; the end of {log}:")
    assert tail == [f"line {i}" for i in range(10, 30)]
    assert told.codes("sampler") == [3, 3, 3]
    assert told.codes("trainer") == [-signal.SIGTERM]


def test_a_log_on_another_machines_disk_is_named(tmp_path: Path) -> None:
    """As of a role that a node of a cluster keeps."""
    engine, log = LocalEngine(tmp_path), tmp_path / "logs" / "t-0.log"
    code = "import os, sys; os.unlink(sys.argv[1]); sys.exit(int(sys.argv[2]))"
    mistaken, lost = (role("t", script(code, str(log), status), ends_run=True) for status in "21")
    with pytest.raises(UserError, match=f"^see {log}$"):
        run(engine, Supervisor(engine, [mistaken]).run())
    engine = LocalEngine(tmp_path)
    with pytest.raises(RoleFailed, match="exited with 1"):
        run(engine, Supervisor(engine, [lost]).run())


def test_a_signal_is_named(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    dies = script("import os; os.kill(os.getpid(), 11)")
    with pytest.raises(RoleFailed, match=r"t: process 1 \(pid \d+\) was killed by SIGSEGV, .*t-1"):
        run(engine, Supervisor(engine, [role("t", PAUSE, dies, ends_run=True)]).run())


@pytest.mark.parametrize(
    ("restarts", "delay"),
    [
        ([], 1.5),
        ([10.0], 3.0),
        ([10.0, 20.0], 6.0),
        ([10.0, 20.0, 30.0], None),
        ([-61.0, -60.0, 30.0], 3.0),  # a restart 100 s ago has left the window of 100 s
        ([-60.0, -59.0, 30.0], 6.0),
        ([-59.0, 20.0, 30.0], None),
    ],
)
def test_restart_policy(restarts: list[float], delay: float | None) -> None:
    """By hand, at time 40: three restarts within 100 s."""
    assert Restart(max_restarts=3, window_s=100.0, backoff_s=1.5).delay(restarts, 40.0) == delay


def test_backoff_stops_doubling() -> None:
    policy = Restart(max_restarts=100, window_s=1000.0, backoff_s=0.5)
    assert [policy.delay([0.0] * n, 1.0) for n in (4, 5, 6, 99)] == [8.0, 16.0, 16.0, 16.0]


def test_a_restart_waits_for_its_backoff(tmp_path: Path) -> None:
    engine, times = LocalEngine(tmp_path), list[float]()

    def on_started(name: str, pid: int) -> None:
        times.append(asyncio.get_running_loop().time())

    crashes = role("t", script("raise SystemExit(1)"), restart=Restart(2, 60.0, 0.2), ends_run=True)
    with pytest.raises(RoleFailed):
        run(engine, Supervisor(engine, [crashes], on_started=on_started).run())
    first, second = (b - a for a, b in pairwise(times))
    assert first >= 0.2 and second >= 0.4


def test_a_mistake_of_the_users_is_told_and_never_tried_again(tmp_path: Path) -> None:
    engine, told = LocalEngine(tmp_path), Told()
    code = "print('noise'); print('rl-jax: seed = -1: at least 0'); raise SystemExit(2)"
    roles = [
        role("trainer", PAUSE, ends_run=True),
        role("sampler", script(code), restart=AT_ONCE, essential=False),
    ]
    with pytest.raises(UserError) as caught:
        run(engine, Supervisor(engine, roles, **told.callbacks()).run())
    assert str(caught.value) == "seed = -1: at least 0"
    assert told.codes("sampler") == [2] and told.codes("trainer") == [-signal.SIGTERM]


def test_a_run_goes_on_without_a_role_it_does_not_need(tmp_path: Path) -> None:
    engine, told = LocalEngine(tmp_path), Told()
    code = "print('no display'); raise SystemExit(5)"
    pipe = Pipe(tmp_path / "pipe")

    def on_lost(name: str, why: str) -> None:
        told.append((name, "lost", why))
        pipe.tell()

    roles = [
        role("trainer", until(pipe), ends_run=True),
        role("viewer", script(code), restart=Restart(1, 60.0, 0.0), essential=False),
    ]
    supervisor = Supervisor(engine, roles, **{**told.callbacks(), "on_lost": on_lost})
    assert run(engine, supervisor.run()) is True
    assert told.codes("viewer") == [5, 5] and told.codes("trainer") == [0]
    (why,) = [entry[2] for entry in told if entry[1] == "lost"]
    assert why.startswith("viewer: process 0") and why.endswith("viewer-0.log: no display")


def test_an_early_exit_with_0_is_healed_too(tmp_path: Path) -> None:
    engine, told = LocalEngine(tmp_path), Told()
    roles = [role("trainer", PAUSE, ends_run=True), role("s", script(""), restart=AT_ONCE)]
    with pytest.raises(RoleFailed, match=r"s: process 0 .* exited with 0, after 3 restarts"):
        run(engine, Supervisor(engine, roles, **told.callbacks()).run())
    assert told.codes("s") == [0, 0, 0, 0]


class RecordingGroup:
    """A local group that notes when `kill` was asked for, and with "over" when it was done."""

    def __init__(self, group: LocalGroup, kills: list[tuple[str, float | str]]) -> None:
        self._group, self._kills = group, kills
        self.name, self.pids, self.log = group.name, group.pids, group.log

    async def call(self, function: str, arguments: Mapping[str, Any], *, deadline: float) -> Any:
        return await self._group.call(function, arguments, deadline=deadline)

    def events(self) -> AsyncIterator[ProcessEvent]:
        return self._group.events()

    async def kill(self, grace_s: float) -> None:
        self._kills.append((self.name, grace_s))
        await self._group.kill(grace_s)
        self._kills.append((self.name, "over"))


class RecordingEngine:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.kills: list[tuple[str, float | str]] = []

    async def start_group(self, spec: GroupSpec) -> RecordingGroup:
        return RecordingGroup(await self._engine.start_group(spec), self.kills)

    def resources(self) -> Resources:
        return self._engine.resources()

    async def close(self) -> None:
        await self._engine.close()


def test_stop_terms_in_order_and_kills_after_the_grace(tmp_path: Path) -> None:
    local, told = LocalEngine(tmp_path), Told()
    engine = RecordingEngine(local)
    pipes = [Pipe(tmp_path / name) for name in ("sampler", "trainer")]
    roles = [
        role("sampler", deaf(pipes[0].path), restart=AT_ONCE),
        role("environments", PAUSE, restart=AT_ONCE),
        role("trainer", deaf(pipes[1].path), restart=AT_ONCE, ends_run=True),
    ]
    supervisor = Supervisor(engine, roles, grace_s=1.0, **told.callbacks())

    async def body() -> tuple[bool, float]:
        running = asyncio.create_task(supervisor.run())
        for pipe in pipes:
            assert await asyncio.to_thread(pipe.told)
        supervisor.stop()
        began = asyncio.get_running_loop().time()
        completed = await running
        return completed, asyncio.get_running_loop().time() - began

    completed, took = run(local, body())
    assert completed is False
    assert engine.kills[:3] == [("sampler", 1.0), ("environments", 1.0), ("trainer", 1.0)]
    over = {(name, "over") for name in ("sampler", "environments", "trainer")}
    assert took >= 1.0 and set(engine.kills[3:]) == over, "the grace is for all together"
    assert told.codes("environments") == [-signal.SIGTERM]
    assert told.codes("sampler") == told.codes("trainer") == [-signal.SIGKILL]


def test_a_second_stop_kills_at_once(tmp_path: Path) -> None:
    engine, told, pipe = LocalEngine(tmp_path), Told(), Pipe(tmp_path / "pipe")
    roles = [role("t", deaf(pipe.path), ends_run=True)]
    supervisor = Supervisor(engine, roles, grace_s=1000.0, **told.callbacks())

    async def body() -> bool:
        running = asyncio.create_task(supervisor.run())
        assert await asyncio.to_thread(pipe.told)
        supervisor.stop()
        await asyncio.sleep(0)
        assert not told.codes("t")
        supervisor.stop()
        return await running

    assert run(engine, body()) is False
    assert told.codes("t") == [-signal.SIGKILL]


def test_a_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    engine, told, pipe = LocalEngine(tmp_path), Told(), Pipe(tmp_path / "pipe")
    roles = [role("t", deaf(pipe.path), ends_run=True), role("s", PAUSE)]
    supervisor = Supervisor(engine, roles, grace_s=0.1, **told.callbacks())

    async def body() -> None:
        running = asyncio.create_task(supervisor.run())
        assert await asyncio.to_thread(pipe.told)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert told.codes("t") == [-signal.SIGKILL] and told.codes("s") == [-signal.SIGTERM]

    run(engine, body())


def test_stop_does_not_wait_for_a_backoff(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    crashes = role(
        "t", script("raise SystemExit(1)"), restart=Restart(1, 60.0, 1000.0), ends_run=True
    )
    supervisor = Supervisor(engine, [crashes], on_ended=lambda role, pid, code: supervisor.stop())
    assert run(engine, supervisor.run()) is False


def test_a_program_that_cannot_be_started_ends_the_run(tmp_path: Path) -> None:
    engine, told = LocalEngine(tmp_path), Told()
    roles = [
        role("trainer", PAUSE, ends_run=True),
        role("sampler", ProcessSpec(("/no/such/program",), {}), restart=AT_ONCE),
    ]
    with pytest.raises(OSError, match="sampler-0: cannot start /no/such/program"):
        run(engine, Supervisor(engine, roles, **told.callbacks()).run())
    assert told.codes("trainer") in ([-signal.SIGTERM], [])


def test_an_error_of_a_callback_is_not_lost(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)

    def on_ended(name: str, pid: int, code: int) -> None:
        raise LookupError(f"{name} {code}")

    roles = [role("trainer", script(""), ends_run=True)]
    with pytest.raises(LookupError, match="trainer 0"):
        run(engine, Supervisor(engine, roles, on_ended=on_ended).run())


def test_what_cannot_be_supervised(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    with pytest.raises(ValueError, match="roles a, b: none of them ends the run"):
        Supervisor(engine, [role("a"), role("b")])
    with pytest.raises(ValueError, match="roles a, a: a name is there twice"):
        Supervisor(engine, [role("a", ends_run=True), role("a")])
    odd = Role("a", lambda _: group("b"), NEVER, True, True)
    with pytest.raises(ValueError, match="role a: its group is called b"):
        run(engine, Supervisor(engine, [odd]).run())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    """The first one is TERM to the roles, the second one KILL at once, long before the grace."""
    pipe = Pipe(tmp_path / "pipe")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.launcher", "supervisor", str(tmp_path), pipe.path],
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        pids = dict(launcher.stdout.readline().split() for _ in range(2))
        watched = {name: Watched(int(pid)) for name, pid in pids.items()}
        assert pipe.told()
        launcher.send_signal(number)
        assert launcher.stdout.readline() == "polite -15\n"
        assert not watched["deaf"].gone(0.0)
        launcher.send_signal(number)
        assert launcher.stdout.read() == "deaf -9\nstopped\n"
        assert launcher.wait(LONG) == 0
        assert watched["polite"].gone(0.0) and watched["deaf"].gone(0.0)
    finally:
        launcher.kill()
        launcher.communicate()
