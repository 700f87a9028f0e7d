"""[H] Every engine keeps the contract: real processes, real signals."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from launch.engine import local
from launch.engine.base import (
    CallFailed,
    Engine,
    Exited,
    Group,
    GroupDied,
    GroupSpec,
    ProcessSpec,
    Started,
    cause,
    child_env,
)
from launch.engine.exits import in_words
from launch.engine.local import LocalEngine, LocalGroup
from launch.engine.wire import MAX_MESSAGE
from launch.engine.world import Place, Ports
from rl_jax.config.base import UserError
from rl_jax.replay.log import write_format
from tests.fakes.processes import Watched
from tests.fakes.ray import cluster, connected
from tests.fakes.role import ENV, group, process, script
from tests.structure.source import modules_after

LONG = 60.0


def ray_engine(run_dir: Path) -> Engine:
    from launch.engine.ray import RayEngine

    return RayEngine(run_dir)


ENGINES: dict[str, Callable[[Path], Engine]] = {"local": LocalEngine, "ray": ray_engine}

Body = Callable[[Engine], Awaitable[None]]
Drive = Callable[[Body], None]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the driver of a Ray cluster."""
    node = {"num_cpus": 1}
    with cluster(tmp_path_factory.mktemp("ray"), node) as made, connected(made):
        yield


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Drive:
    """Runs a test's body on a new engine and closes it."""
    if request.param == "ray":
        request.getfixturevalue("one_node")

    async def main(body: Body) -> None:
        write_format(tmp_path)
        engine = ENGINES[request.param](tmp_path)
        try:
            async with asyncio.timeout(LONG):
                await body(engine)
        finally:
            await engine.close()

    return lambda body: asyncio.run(main(body))


async def exits(group: Group) -> list[Exited]:
    return [event async for event in group.events() if isinstance(event, Exited)]


async def ready(group: Group) -> None:
    assert await group.call("echo", {"value": 1}, deadline=LONG) == 1


def test_a_call_waits_for_the_process_to_serve_and_values_come_back(drive: Drive) -> None:
    value = {"a": [1, -2.5, None, True], "b": {"text": "ü", "bytes": b"\x00\xff"}, "n": 2**63}

    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("sampler-0"))
        assert started.name == "sampler-0"
        calls = (started.call("echo", {"value": [value, i]}, deadline=LONG) for i in range(9))
        assert await asyncio.gather(*calls) == [[value, i] for i in range(9)]

    drive(body)


def test_every_process_leads_a_session_of_its_own(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        one, other = [await engine.start_group(group(name)) for name in "ab"]
        for started in (one, other):
            pid, session, process_group = await started.call("session", {}, deadline=LONG)
            assert [pid] == list(started.pids)
            assert pid == session == process_group
        assert one.pids != other.pids

    drive(body)


def test_environment(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_LOCALID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM", "MEGASCALE_X", "KEPT"):
        monkeypatch.setenv(name, "outer")

    async def body(engine: Engine) -> None:
        spec = group("a", process(env={"OWN": "1", "SLURM_JOB_ID": "meant"}))
        got = await (await engine.start_group(spec)).call("environment", {}, deadline=LONG)
        assert got["OWN"] == "1" and got["KEPT"] == "outer" and got["SLURM_JOB_ID"] == "meant"
        stripped = ("PMI_", "PMIX_", "OMPI_", "MEGASCALE_", "SLURM_LOCALID")
        assert not [name for name in got if name.startswith(stripped)]
        assert not [name for name in got if name.startswith("RL_JAX_CONTROL")]

    drive(body)


def test_output_of_every_attempt_goes_to_the_log(drive: Drive, tmp_path: Path) -> None:
    async def body(engine: Engine) -> None:
        for text in ("first", "second"):
            started = await engine.start_group(group("a"))
            await started.call("say", {"text": text}, deadline=LONG)
            await started.kill(LONG)
        assert started.log(0) == tmp_path / "logs" / "a-0.log"
        said = "first\nfirst (stderr)\nsecond\nsecond (stderr)\n"
        assert started.log(0).read_text() == said

    drive(body)


def test_events_are_told_from_the_start_to_every_listener(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a", script("raise SystemExit(7)")))
        (pid,) = started.pids
        for _ in range(2):
            assert [e async for e in started.events()] == [Started(pid), Exited(0, pid, 7)]

    drive(body)


def test_term_ends_a_group(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        await ready(started)
        await started.kill(LONG)
        assert [e.code for e in await exits(started)] == [-signal.SIGTERM]
        await started.kill(LONG)  # nothing is left to do

    drive(body)


def test_kill_follows_where_term_is_ignored(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a", process("deaf")))
        await ready(started)
        watched, began = Watched(started.pids[0]), time.monotonic()
        await started.kill(0.3)
        assert watched.gone(0.0)
        assert 0.3 <= time.monotonic() - began < 10.0
        assert [e.code for e in await exits(started)] == [-signal.SIGKILL]

    drive(body)


def test_a_second_kill_can_be_in_more_of_a_hurry(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a", process("deaf")))
        await ready(started)
        patient = asyncio.create_task(started.kill(1000.0))
        await asyncio.sleep(0)
        await started.kill(0.0)
        await patient
        assert [e.code for e in await exits(started)] == [-signal.SIGKILL]

    drive(body)


@pytest.mark.parametrize("how", ["kill", "crash", "exit 0"])
def test_a_grandchild_goes_with_its_group(drive: Drive, how: str) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        grandchild = Watched(await started.call("grandchild", {}, deadline=LONG))
        match how:
            case "kill":
                await started.kill(LONG)
            case "crash":
                os.kill(started.pids[0], signal.SIGKILL)
            case "exit 0":
                with pytest.raises(GroupDied, match="exited with 0"):
                    await started.call("leave", {"code": 0}, deadline=LONG)
        await exits(started)
        assert grandchild.gone()

    drive(body)


def test_one_of_two_dies_and_the_other_is_ended(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("world", process(), process("deaf"), grace_s=0.2))
        await ready(started)
        os.kill(started.pids[0], signal.SIGKILL)
        first, second = await exits(started)
        assert first == Exited(0, started.pids[0], -signal.SIGKILL)
        assert second.index == 1 and second.code in (-signal.SIGTERM, -signal.SIGKILL)
        with pytest.raises(GroupDied, match=f"world has ended: .*{first.pid}.*killed by SIGKILL"):
            await ready(started)

    drive(body)


def test_after_an_orderly_exit_the_others_have_time_to_follow(drive: Drive, tmp_path: Path) -> None:
    """The second process ends by itself once the first has: by the end of a pipe between them."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    first = script("import sys; open(sys.argv[1], 'w')", str(fifo))
    second = script("import sys; open(sys.argv[1]).read()", str(fifo))

    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("world", first, second, grace_s=LONG))
        assert sorted(e.code for e in await exits(started)) == [0, 0]

    drive(body)


def test_who_does_not_follow_an_orderly_exit_is_ended(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        spec = group("world", script(""), process("deaf"), grace_s=0.1)
        assert [e.index for e in await exits(await engine.start_group(spec))] == [0, 1]

    drive(body)


def test_a_call_without_an_answer_ends_at_its_deadline(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("sampler-3"))
        await ready(started)
        with pytest.raises(TimeoutError, match=r"sampler-3: no answer to hang\(\) within 0.2 s"):
            await started.call("hang", {}, deadline=0.2)
        await ready(started)
        silent = await engine.start_group(group("b", script("import signal; signal.pause()")))
        with pytest.raises(TimeoutError, match=r"b: no answer to echo\(\) within 0.2 s"):
            await silent.call("echo", {"value": 1}, deadline=0.2)

    drive(body)


def test_a_call_in_flight_tells_how_the_process_died(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        await ready(started)
        call = asyncio.create_task(started.call("hang", {}, deadline=LONG))
        with pytest.raises(GroupDied, match=r"a has ended: .* exited with 9"):
            await started.call("leave", {"code": 9}, deadline=LONG)
        with pytest.raises(GroupDied, match=r"a has ended: .* exited with 9"):
            await call
        with pytest.raises(GroupDied, match="exited with 9"):
            await started.call("echo", {"value": 1}, deadline=LONG)

    drive(body)


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("fail", {"text": "lost"}, r"a: fail\(\): KeyError: 'lost'"),
        ("echo", {"wrong": 1}, r"a: echo\(\): TypeError: .*wrong"),
        ("none", {}, r"a: none\(\): no function none; there are big, control"),
        ("odd", {}, r"a: odd\(\): ValueError: not a control message"),
        ("big", {"size": MAX_MESSAGE}, r"a: big\(\): ValueError: a control message of 1677\d+ b"),
    ],
)
def test_a_call_that_fails_says_why_and_the_next_one_works(
    drive: Drive, function: str, arguments: dict[str, Any], text: str
) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        with pytest.raises(CallFailed, match=text):
            await started.call(function, arguments, deadline=LONG)
        await ready(started)

    drive(body)


def test_arguments_that_cannot_be_sent(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        with pytest.raises(ValueError, match=f"at most {MAX_MESSAGE}"):
            await started.call("echo", {"value": bytes(MAX_MESSAGE)}, deadline=LONG)
        with pytest.raises(ValueError, match=r"not a control message: .*Path"):
            await started.call("echo", {"value": Path()}, deadline=LONG)

    drive(body)


def test_names(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        with pytest.raises(ValueError, match="a group a is alive already"):
            await engine.start_group(group("a"))
        await started.kill(0.0)
        await ready(await engine.start_group(group("a")))

    drive(body)


def test_a_group_starts_whole_or_not_at_all(drive: Drive) -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")

    async def body(engine: Engine) -> None:
        before = children.read_text()
        spec = group("a", process(), ProcessSpec(("/no/such/program",), {}))
        with pytest.raises(OSError, match="a-1: cannot start /no/such/program"):
            await engine.start_group(spec)
        assert children.read_text() == before
        await ready(await engine.start_group(group("a")))

    drive(body)


def test_close_kills_everything(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        groups = [await engine.start_group(group(name, process("deaf"))) for name in "abc"]
        await asyncio.gather(*map(ready, groups))
        watched = [Watched(pid) for started in groups for pid in started.pids]
        await engine.close()
        assert all(each.gone(0.0) for each in watched)
        with pytest.raises(RuntimeError, match="d: the engine is closed"):
            await engine.start_group(group("d"))

    drive(body)


def test_a_process_that_cannot_be_killed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one inside of a driver is: here KILL is never sent."""

    async def main() -> None:
        engine = LocalEngine(tmp_path)
        try:
            spec = group("world", process(), process("deaf"), grace_s=0.0)
            started = await engine.start_group(spec)
            await ready(started)
            with monkeypatch.context() as patch:
                patch.setattr(local, "REAP_S", 0.1)
                patch.setattr(LocalGroup, "_signal", lambda group, number: None)
                os.kill(started.pids[0], signal.SIGKILL)
                text = rf"world: pids \[{started.pids[1]}\] did not end 0.1 s after KILL"
                with pytest.raises(TimeoutError, match=text):
                    await exits(started)
        finally:
            await engine.close()

    asyncio.run(main())


def test_resources(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        cpus, devices = engine.resources()
        assert 1 <= cpus <= (os.cpu_count() or 1)
        assert len(list(Path("/dev").glob("nvidia[0-9]*"))) == devices.get("gpu", 0)
        assert all(devices.values())

    drive(body)


def test_events_can_be_left(drive: Drive) -> None:
    async def body(engine: Engine) -> None:
        started = await engine.start_group(group("a"))
        async with aclosing(started.events()) as events:
            assert await anext(events) == Started(started.pids[0])

    drive(body)


WORLD = """
from launch.engine.child import die_with_parent
die_with_parent()
import asyncio, os
import jax, numpy as np
from launch.engine.world import Place
from rl_jax.trainer.world import World
place = Place.from_env(os.environ)
joining = World.join(
    place.coordinator, place.size, place.process_id, channel=place.channel, token="t",
    join_s=40, heartbeat_s=10,
)
async def main():
    async with joining:
        add_up()
def add_up():
    mesh = jax.make_mesh((2,), ("x",))
    mine = np.array([3.0 + 4.0 * jax.process_index()], np.float32)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.make_array_from_process_local_data(sharding, mine)
    total = jax.shard_map(
        lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=sharding.spec,
        out_specs=jax.sharding.PartitionSpec(),
    )
    found = float(jax.jit(total)(x).addressable_data(0)[0])
    print("sum", found, "of", jax.process_count(), flush=True)
asyncio.run(main())
"""


def world(name: str, places: list[Place]) -> GroupSpec:
    plain = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "SLURM_LOCALID": "1"}
    members = [script(WORLD) for _ in places]
    return group(
        name,
        *(
            ProcessSpec((m.argv[0], *m.argv[2:]), {**ENV, **plain, **place.to_env()})
            for m, place in zip(members, places, strict=True)
        ),
        grace_s=10.0,
    )


def test_a_world_of_two_processes_sums(drive: Drive) -> None:
    """3 of the first process and 7 of the second."""

    async def body(engine: Engine) -> None:
        started = await engine.start_group(world("trainer", Ports().places(2)))
        codes = [e.code for e in await exits(started)]
        logs = [started.log(i).read_text() for i in range(2)]
        assert codes == [0, 0], "".join(logs)
        assert all("sum 10.0 of 2" in log for log in logs)

    drive(body)


def test_a_coordinator_port_in_use_is_told(drive: Drive) -> None:
    places = Ports().places(2)

    async def body(engine: Engine) -> None:
        address = places[0].coordinator
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            started = await engine.start_group(world("trainer", places))
            first = cause(await exits(started))
            assert (first.index, first.code) == (0, 1)
            last = started.log(0).read_text().splitlines()[-1]
            assert last == f"OSError: coordinator port {address} is in use; " + (
                "a restart takes another one"
            )

    drive(body)


def test_worlds_have_free_ports_below_the_ephemeral_ones() -> None:
    floor = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = Ports()
    ports = [int(own.take().rpartition(":")[2]) for _ in range(20)]
    assert len(set(ports)) == 20 and max(ports) < floor
    with socket.create_server(("127.0.0.1", ports[-1] + 1)):
        assert own.take() == f"127.0.0.1:{ports[-1] + 2}"


@pytest.mark.parametrize("process_id", [-1, 2])
def test_a_process_outside_of_its_world(process_id: int) -> None:
    with pytest.raises(ValueError, match=f"process {process_id} of a world of 2"):
        Place(process_id, 2, "127.0.0.1:9000", "127.0.0.1:9001").to_env()


@pytest.mark.parametrize(
    ("name", "processes", "text"),
    [
        ("a/b", (process(),), "group name 'a/b'"),
        ("", (process(),), "group name ''"),
        ("a", (), "group a: needs at least one process"),
        ("a", (process(), ProcessSpec((), {})), "group a: needs .* each with a program"),
    ],
)
def test_groups_that_cannot_be(name: str, processes: tuple[ProcessSpec, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GroupSpec(name, processes, 1.0)


def test_child_env_lets_the_spec_win_but_not_over_the_control_socket() -> None:
    spec = ProcessSpec(("x",), {"A": "spec", "C": "spec", "PYTHONUNBUFFERED": ""})
    got = child_env({"A": "outer", "B": "outer", "SLURM_X": "outer"}, spec, {"C": "own"})
    assert got == {"A": "spec", "B": "outer", "C": "own", "PYTHONUNBUFFERED": ""}


def test_the_cause_is_the_first_that_failed() -> None:
    well, killed, failed = Exited(0, 1, 0), Exited(1, 2, -9), Exited(2, 3, 1)
    assert cause([well, killed, failed]) is killed
    assert cause([well, Exited(1, 2, 0)]) is well
    assert in_words(killed) == "process 1 (pid 2) was killed by SIGKILL"
    assert in_words(failed) == "process 2 (pid 3) exited with 1"
    assert in_words(Exited(0, 1, -60)) == "process 0 (pid 1) was killed by signal 60"


def test_engines_import_no_jax() -> None:
    assert "jax" not in modules_after(
        "import launch.supervisor, launch.engine.local, launch.engine.child, launch.engine.world"
    )


@pytest.mark.ray
@pytest.mark.usefixtures("one_node")
def test_a_port_that_another_run_has_is_told(tmp_path: Path) -> None:
    from launch.engine.ray import Berth, RayEngine

    async def main() -> None:
        write_format(tmp_path)
        berths = {"a": [Berth({"num_cpus": 0}, None, "north")]}
        engine = RayEngine(tmp_path, berths)
        try:
            with socket.create_server(("", 0)) as others:
                port = others.getsockname()[1]
                spec = group("a", process()._replace(ports=(port,)))
                with pytest.raises(UserError) as told:
                    await engine.start_group(spec)
            assert str(told.value) == (
                f"a-0: port {port} of its node north is in use, as by another run: choose others "
                "with launch.first_port"
            )
            await ready(await engine.start_group(spec))
        finally:
            await engine.close()

    asyncio.run(main())
