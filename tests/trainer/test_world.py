"""A world of trainer processes: the bits of one process, one batch for all, and an end for all.

Connections are tested between worlds in one event loop, everything that needs jax between real
processes.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import msgpack
import numpy as np
import pytest

from rl_jax.sharding import make_mesh
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.batches import Shape, empty_batch
from rl_jax.trainer.channel import Peer, connected
from rl_jax.trainer.membership import (
    BATCH,
    STOP,
    Header,
    decode_header,
    encode_header,
    name_of,
    unpack_checked,
)
from rl_jax.trainer.placement import gather, place
from rl_jax.trainer.world import LOST, Take, Taken, World, agreed, hear, shared_take, tell
from rl_jax.trajectories.codec import pack_group
from rl_jax.trajectories.types import Group
from rl_jax.wire import silence
from tests.fakes.compiling import QUICK_FLAGS
from tests.fakes.world_training import UPDATES, groups_of, refuse

ROOT = Path(__file__).parents[2]
TOKEN = "a token"
FLAGS = f"--xla_cpu_collective_call_terminate_timeout_seconds=20 {QUICK_FLAGS}"


def free_address() -> str:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{own.getsockname()[1]}"


@asynccontextmanager
async def worlds(size: int = 2) -> AsyncIterator[list[World]]:
    """Connected, without `jax.distributed`."""
    address = free_address()
    async with asyncio.timeout(20.0), AsyncExitStack() as stack:
        joining = (connected(address, TOKEN, n, size, deadline_s=10.0) for n in range(size))
        peers = await asyncio.gather(*map(stack.enter_async_context, joining))
        yield [World(n, size, own) for n, own in enumerate(peers)]


def giving(taken: Taken | None) -> Take:
    async def take(update: int) -> Taken | None:
        return taken

    return take


def packed_of(groups: Sequence[Group]) -> list[bytes]:
    return [pack_group(group) for group in groups]


def header_of(groups: Sequence[Group], update: int = 1) -> Header:
    size = sum(map(len, packed_of(groups)))
    return Header(BATCH, update, 4, tuple(map(name_of, groups)), size)


def test_every_process_gets_what_process_0_takes_and_the_stop() -> None:
    async def run() -> None:
        async with worlds(3) as (leader, *followers):
            taken = Taken(groups_of(1), 4)
            takes = [giving(taken), refuse, refuse]
            got = await asyncio.gather(
                *(
                    shared_take(world, take, 1, deadline_s=5.0)
                    for world, take in zip([leader, *followers], takes, strict=True)
                )
            )
            assert got[0] is taken
            for other in got[1:]:
                assert other and packed_of(other.groups) == packed_of(taken.groups)
                assert other.published_version == 4
            takes[0] = giving(None)
            stopped = await asyncio.gather(
                *(
                    shared_take(world, take, 2, deadline_s=5.0)
                    for world, take in zip([leader, *followers], takes, strict=True)
                )
            )
            assert stopped == [None, None, None]

    asyncio.run(run())


def test_process_0_sends_the_membership_first_and_waits_for_all() -> None:
    async def run() -> None:
        async with worlds() as (leader, follower):
            groups = groups_of(1)
            taking = asyncio.create_task(
                shared_take(leader, giving(Taken(groups, 4)), 7, deadline_s=5.0)
            )
            (peer,) = follower.peers
            assert decode_header(await peer.receive()) == header_of(groups, update=7)
            assert [await peer.receive() for _ in groups] == packed_of(groups)
            assert not taking.done()
            await peer.send(b"")
            assert await taking

    asyncio.run(run())


def other_rollout(group: Group) -> Group:
    first, *rest = group.members
    return replace(group, members=(replace(first, key=first.key._replace(attempt=1)), *rest))


ONE, TWO, THREE = groups_of(1)
FAULTS = {
    "order": (header_of([ONE, TWO]), [TWO, ONE], "names .*'lookup', 0.* are of .*'lookup', 1"),
    "attempt": (
        header_of([ONE, TWO]),
        [ONE, other_rollout(TWO)],
        r"group 1: the membership names \('lookup', 1, \(\(0, 0\), \(1, 0\)\)\), "
        r"the data are of \('lookup', 1, \(\(0, 1\), \(1, 0\)\)\)",
    ),
    "size": (header_of([ONE])._replace(size=5), [ONE], "has 5 bytes, [0-9]+ came"),
    "update": (header_of([ONE], update=2), [ONE], "process 0 is at update 2, this process at 1"),
    "stop": (Header(STOP, 3, 0, (), 0), [], "process 0 is at update 3, this process at 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_follower_refuses_data_that_were_not_announced(fault: str) -> None:
    header, sent, message = FAULTS[fault]

    async def run() -> None:
        async with worlds() as (leader, follower):
            (peer,) = leader.peers
            await peer.send(encode_header(header), *packed_of(sent))
            with pytest.raises(ValueError, match=message) as raised:
                await shared_take(follower, refuse, 1, deadline_s=5.0)
            assert (await peer.receive()).decode() == str(raised.value)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode_header(header_of([ONE]))[:-1],
        encode_header(header_of([ONE])._replace(kind="other")),
        msgpack.packb({"kind": "stop"}),
        msgpack.packb(header_of([ONE])._asdict() | {"update": "1"}),
    ],
)
def test_a_damaged_header_is_named(data: bytes) -> None:
    with pytest.raises(ValueError, match="header of an update is damaged"):
        decode_header(data)


def test_announced_groups_come_out_as_they_went_in() -> None:
    out = unpack_checked(header_of([ONE, THREE]), packed_of([ONE, THREE]))
    assert packed_of(out) == packed_of([ONE, THREE])


def test_process_0_names_the_process_that_refuses() -> None:
    async def run() -> None:
        async with worlds(3) as (leader, good, bad):
            await good.peers[0].send(b"")
            await bad.peers[0].send(b"odd")
            with pytest.raises(ValueError, match="update 1: process 2 says: odd"):
                await shared_take(leader, giving(Taken([ONE], 0)), 1, deadline_s=5.0)

    asyncio.run(run())


def test_a_follower_that_is_asked_to_stop_is_heard_and_the_batch_is_trained_on() -> None:
    async def run() -> None:
        heard: list[str] = []
        async with worlds(3) as own:
            taken = Taken([ONE], 0)
            sharing = (
                shared_take(
                    world,
                    refuse if world.process_id else giving(taken),
                    1,
                    deadline_s=5.0,
                    asked=lambda world=world: world.process_id == 2,
                    ask=lambda world=world: heard.append(f"by {world.process_id}"),
                )
                for world in own
            )
            assert all(await asyncio.gather(*sharing))
        assert heard == ["by 0"]

    asyncio.run(run())


@pytest.mark.parametrize("asked", [set(), {0}, {2}, {0, 1, 2}])
def test_all_go_on_or_none(asked: set[int]) -> None:
    async def run() -> None:
        async with worlds(3) as own:
            going = [
                agreed(world, lambda n=n: n in asked, deadline_s=5.0) for n, world in enumerate(own)
            ]
            assert await asyncio.gather(*going) == [not asked] * 3
            text = "process 1 of 3 waited 0.05 s for process 0 to say whether all go on"
            with pytest.raises(TimeoutError, match=text):
                await agreed(own[1], lambda: False, deadline_s=0.05)

    asyncio.run(run())
    assert asyncio.run(agreed(World.single(), lambda: bool(asked), deadline_s=1.0)) == (not asked)


def test_process_0_names_who_does_not_say_whether_to_go_on() -> None:
    async def run() -> None:
        async with worlds(3) as (leader, good, _):
            await good.peers[0].send(b"")
            text = "process 0 of 3 waited 0.05 s for process 2 to say whether all go on"
            with pytest.raises(TimeoutError, match=text):
                await agreed(leader, lambda: False, deadline_s=0.05)

    asyncio.run(run())


@pytest.mark.parametrize("size", [2, 1 << 20])
def test_an_end_behind_what_nobody_asked_for_is_noticed(size: int) -> None:
    """A megabyte is more than a stream holds before it stops to read."""

    async def run() -> None:
        async with worlds(3) as (leader, busy, _):
            await asyncio.gather(*(peer.send(bytes(size)) for peer in leader.peers))
            for peer in leader.peers:
                peer.close()
            (peer,) = busy.peers
            async with asyncio.timeout(5.0):
                while not peer.gone:
                    await asyncio.sleep(0)
            assert await peer.receive() == bytes(size)
            with pytest.raises(ConnectionError, match="process 0 is gone"):
                await peer.receive()

    asyncio.run(run())


def test_who_reads_nothing_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that is held up: its kernel answers, and takes no more than fits."""
    for name in ("SILENT_S", "_FIRST_S", "_EVERY_S"):
        monkeypatch.setattr(silence, name, 1)
    monkeypatch.setattr(silence, "IDLE_S", 2)
    frame = bytes(32 << 20)

    async def hold(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await dialled(address)
        hello = msgpack.Packer().pack([TOKEN, 1, 2])
        writer.write(len(hello).to_bytes(8) + hello)
        assert await reader.readexactly(8) == bytes(8), "no refusal"
        return reader, writer

    async def run() -> None:
        address = free_address()
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:
            holding = asyncio.create_task(hold(address))
            leading = connected(address, TOKEN, 0, 2, deadline_s=10.0)
            (peer,) = await stack.enter_async_context(leading)
            reader, writer = await holding
            sending = asyncio.create_task(peer.send(frame))
            ended, _ = await asyncio.wait({sending}, timeout=3.0)
            assert not ended and not peer.gone
            assert await reader.readexactly(8 + len(frame)) == len(frame).to_bytes(8) + frame
            await sending
            writer.close()

    asyncio.run(run())


async def dialled(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    while True:
        try:
            return await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(0)


def test_what_process_0_tells_all_hear_and_no_wait_is_for_ever() -> None:
    async def run() -> None:
        async with worlds(3) as (leader, *followers):
            await tell(leader, b"where")
            assert [await hear(world, deadline_s=5.0) for world in followers] == [b"where"] * 2
            with pytest.raises(TimeoutError):
                await hear(followers[0], deadline_s=0.05)

    asyncio.run(run())


@pytest.mark.parametrize("silent", [0, 1])
def test_no_wait_is_for_ever(silent: int) -> None:
    async def run() -> None:
        async with worlds() as both:
            take = refuse if silent == 0 else giving(Taken([ONE], 0))
            line = f"process {1 - silent} of 2 has no batch for update 1 in 0.05 s"
            with pytest.raises(TimeoutError, match=line):
                await shared_take(both[1 - silent], take, 1, deadline_s=0.05)

    asyncio.run(run())


def test_a_queue_that_times_out_says_so_itself() -> None:
    async def late(update: int) -> Taken | None:
        raise TimeoutError("the queue is empty")

    with pytest.raises(TimeoutError, match=r"^the queue is empty$"):
        asyncio.run(shared_take(World.single(), late, 1, deadline_s=5.0))


def test_followers_hear_that_process_0_failed() -> None:
    async def run() -> None:
        address = free_address()
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:

            async def lead() -> None:
                async with connected(address, TOKEN, 0, 2, deadline_s=10.0) as peers:
                    await shared_take(World(0, 2, peers), refuse, 1, deadline_s=5.0)

            leading = asyncio.create_task(lead())
            follower = connected(address, TOKEN, 1, 2, deadline_s=10.0)
            world = World(1, 2, await stack.enter_async_context(follower))
            with pytest.raises(ConnectionError, match="process 0 is gone"):
                await shared_take(world, refuse, 1, deadline_s=5.0)
            with pytest.raises(AssertionError, match="only process 0 takes"):
                await leading

    asyncio.run(run())


def joining(address: str, number: int, size: int, token: str = TOKEN, deadline_s: float = 5.0):
    """Joins far enough to hear who is missing; jax is not touched before all are there."""
    return World.join("127.0.0.1:1", size, number, channel=address, token=token, join_s=deadline_s)


def test_process_0_says_who_is_missing() -> None:
    async def run() -> None:
        address = free_address()
        follower = asyncio.create_task(joining(address, 2, 3).__aenter__())
        line = f"of 3 processes, 1 did not come to {address} within 0.5 s"
        with pytest.raises(TimeoutError, match=f"^{line}$"):
            await joining(address, 0, 3, deadline_s=0.5).__aenter__()
        with pytest.raises(ConnectionError, match="process 0 is gone"):
            await follower

    asyncio.run(run())


def test_a_follower_says_that_process_0_is_missing() -> None:
    address = free_address()
    line = f"process 0 at {address} is not there within 0.2 s"
    with pytest.raises(TimeoutError, match=line):
        asyncio.run(joining(address, 1, 2, deadline_s=0.2).__aenter__())


def test_strangers_and_doubles_are_kept_out() -> None:
    async def run() -> None:
        address = free_address()
        async with AsyncExitStack() as stack:
            leading = asyncio.create_task(
                stack.enter_async_context(connected(address, TOKEN, 0, 3, deadline_s=10.0))
            )
            with pytest.raises(ConnectionError, match="does not take this token"):
                await joining(address, 1, 3, token="another").__aenter__()
            with pytest.raises(ValueError, match="process 1 of 2 does not belong to a world of 3"):
                await joining(address, 1, 2).__aenter__()
            host, port = address.split(":")
            talker = Peer("", *await asyncio.open_connection(host, int(port)))
            await talker.send(b"GET / HTTP/1.1")
            with pytest.raises(ConnectionError):
                await talker.receive()
            talker.close()
            first, second = (
                asyncio.create_task(joining(address, 1, 3).__aenter__()) for _ in range(2)
            )
            done, _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(ValueError, match="process 0 refuses: process 1 is there already"):
                done.pop().result()
            assert not leading.done()
            for task in (leading, first, second):
                task.cancel()
            await asyncio.gather(leading, first, second, return_exceptions=True)

    asyncio.run(run())


def test_a_mesh_of_one_process_takes_host_arrays_as_they_are() -> None:
    batch = empty_batch(Shape(1, 2, 64))
    assert place(batch, make_mesh(jax.devices(), 2, 1)) is batch


# Real processes

SPIN, STUCK = {"role": "spin"}, {"role": "stuck"}


async def start(module: str, options: dict[str, Any], devices: int) -> asyncio.subprocess.Process:
    flags = f"{FLAGS} --xla_force_host_platform_device_count={devices}"
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", f"tests.fakes.{module}", json.dumps(options)),
        cwd=ROOT,
        # Each compiles on its own, as on machines of a world.
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@asynccontextmanager
async def processes(
    module: str, own: dict[str, str], deadline_s: float = 60.0, heartbeat_s: int = 5
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Two that make up a world; none is left after `deadline_s` or a failure."""
    common = own | {"size": 2, "token": TOKEN}
    common |= {"coordinator": free_address(), "channel": free_address()}
    common |= {"join_s": 40.0, "heartbeat_s": heartbeat_s, "leave_s": 10.0}
    both = [await start(module, common | {"process_id": n}, devices=1) for n in range(2)]
    try:
        async with asyncio.timeout(deadline_s):
            yield both
    finally:
        for process in both:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def said(process: asyncio.subprocess.Process, line: bytes) -> None:
    """Reads up to `line`."""
    assert process.stdout is not None
    while (got := await process.stdout.readline()) != line:
        assert got, (await process.communicate())[1].decode()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    """(exit code, rest of the output, errors)."""
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


def test_two_processes_make_the_bits_of_one(tmp_path: Path) -> None:
    """On a mesh of 2 the sum over the data axis has two terms, so its order cannot matter; all are
    compiled alike."""

    async def run() -> None:
        one = await start("world_training", {"out": str(tmp_path / "one.npz")}, devices=2)
        out = {"out": str(tmp_path / "two.npz")}
        async with processes("world_training", out, deadline_s=120.0) as both:
            for code, _, errors in await asyncio.gather(*map(ended, [one, *both])):
                assert code == 0, errors

    asyncio.run(run())
    one, two = np.load(tmp_path / "one.npz"), np.load(tmp_path / "two.npz")
    assert set(one.files) == set(two.files)
    assert not [name for name in one.files if one[name].tobytes() != two[name].tobytes()]
    assert two["['state']['step']"] == UPDATES
    losses = [float(two[f"['reports'][{n}].loss"]) for n in range(2 * UPDATES)]
    assert len(set(losses)) == 2 * UPDATES and all(losses), "of critic and policy in turn"
    stores = [SnapshotStore(tmp_path / name) for name in ("one", "two")]
    assert len({store.manifest(0).digest for store in stores}) == 1
    read = [name for name in two.files if name.startswith("['loaded']")]
    assert len(read) == sum(name.startswith("['state']") for name in two.files)
    for name in read:
        assert two[name].tobytes() == two[name.replace("loaded", "state")].tobytes(), name
    values = [two[f"['values'][{n}]"].any() for n in range(UPDATES)]
    assert values == [False, *[True] * (UPDATES - 1)], "a new critic says 0"


def test_term_stops_every_process_at_the_same_update() -> None:
    async def run() -> None:
        async with processes("world_process", SPIN) as both:
            await said(both[1], b"spinning\n")
            both[1].send_signal(signal.SIGTERM)
            (code, out, errors), other = await asyncio.gather(*map(ended, both))
            assert code == other[0] == 0, errors + other[2]
            assert "stopped at" in other[1]
            assert out.splitlines()[-1] == other[1].splitlines()[-1]

    asyncio.run(run())


@pytest.mark.parametrize("killed", [0, 1])
def test_who_is_left_alone_ends_by_itself(killed: int) -> None:
    """Within the heartbeat of 5 s, by the closed connection or by jax, which aborts."""

    async def run() -> None:
        async with processes("world_process", SPIN, deadline_s=50.0) as both:
            for process in both:
                await said(process, b"spinning\n")
            both[killed].kill()
            async with asyncio.timeout(20.0):
                code, _, errors = await ended(both[1 - killed])
            assert code
            assert f"process {killed} is gone" in errors or "another task died" in errors

    asyncio.run(run())


@pytest.mark.parametrize("killed", [0, 1])
def test_who_waits_in_a_collective_with_the_dead_ends(killed: int) -> None:
    """At once, since its connection ends; jax, which serves its heartbeat of 60 s in process 0,
    only notices the loss of that one sooner, and aborts."""

    async def run() -> None:
        async with processes("world_process", STUCK, deadline_s=50.0, heartbeat_s=60) as both:
            for process in both:
                await said(process, b"stuck\n")
            both[killed].kill()
            async with asyncio.timeout(20.0):
                code, _, errors = await ended(both[1 - killed])
            aborted = killed == 0 and code == -signal.SIGABRT and "another task died" in errors
            assert code == LOST or aborted
            assert aborted or f"rl-jax: process {killed} is gone, and with it the world" in errors

    asyncio.run(run())


def test_gather_in_one_process_copies() -> None:
    tree = {"a": jax.numpy.arange(4.0)}
    host = gather(tree)
    assert host is not None and host["a"].flags.owndata
    assert host["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
