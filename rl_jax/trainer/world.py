"""[H] The trainer as a world of processes: one global mesh, batches from process 0.

All processes run the same programs in the same order. Only process 0 has a queue and a store; it
tells the others what it took over connections of its own (channel.py) and not by a collective: a
socket has a deadline and an end of file, a collective has neither. Every process gets the whole
batch, so process 0 sends it size - 1 times.

jax.distributed takes TERM for itself: a process that wants to hear it listens after it has joined,
and `shared_take` passes it on.
"""

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import jax

from rl_jax.trainer.channel import Peer, connected, is_free, split
from rl_jax.trainer.loop import Take, Taken
from rl_jax.trainer.membership import (
    BATCH,
    STOP,
    Header,
    check_update,
    decode_header,
    encode_header,
    name_of,
    unpack_checked,
)
from rl_jax.trajectories.codec import pack_group

LEAVING = b"it has left the world"
GO, SKIP, STOP_NOW, STAY = b"go", b"skip", b"stop", b"stay"
"""What process 0 tells the others ahead of what all do together, or instead of it."""
LOOK_S = 0.25
UNWIND_S = 1.0
"""What hears of a lost peer by its connection may say so before the process ends."""
LOST = 134
"""Exit status of a process whose world is lost, as that of jax's abort."""
READY, ASKED = b"", b"it was asked to stop"
"""What a follower says where process 0 asks how it stands."""


@dataclass(frozen=True)
class World:
    process_id: int
    size: int
    peers: tuple[Peer, ...] = ()
    """On process 0 processes 1 to size - 1; elsewhere process 0."""

    @staticmethod
    def single() -> "World":
        """One process, no connection, no `jax.distributed`."""
        return World(0, 1)

    @staticmethod
    @asynccontextmanager
    async def join(
        coordinator: str,
        size: int,
        process_id: int,
        *,
        channel: str,
        token: str,
        join_s: float = 300.0,
        heartbeat_s: int = 30,
        leave_s: float = 60.0,
    ) -> AsyncIterator["World"]:
        """The world that all `size` processes make up; enter it before jax touches a device.

        `coordinator` and `channel` are two addresses ("host:port") of process 0. TimeoutError,
        naming who is missing, after `join_s` seconds. Leaving waits up to `leave_s` seconds for all
        others to leave too. A process that leaves by an exception, or dies, closes its connections,
        which the others hear; one that waits in a collective cannot be told, so it ends at once
        with status LOST. Where no end of a connection comes, jax aborts after `heartbeat_s`
        seconds. OSError where process 0 finds a port in use.
        """
        if process_id == 0 and not is_free(*split(coordinator)):  # jax would end by a signal
            raise OSError(f"coordinator port {coordinator} is in use; a restart takes another one")
        async with connected(channel, token, process_id, size, deadline_s=join_s) as peers:
            await asyncio.to_thread(
                jax.distributed.initialize,
                coordinator_address=coordinator,
                num_processes=size,
                process_id=process_id,
                cluster_detection_method="deactivate",
                coordinator_bind_address=coordinator,
                initialization_timeout=math.ceil(join_s),
                heartbeat_timeout_seconds=heartbeat_s,
                shutdown_timeout_seconds=math.ceil(leave_s),
            )
            world = World(process_id, size, peers)
            watching = asyncio.create_task(_end_with(peers))
            try:
                yield world
            finally:
                watching.cancel()
            await _leave(world, leave_s)
            await asyncio.to_thread(jax.distributed.shutdown)


ALONE = World.single()


async def tell(world: World, text: bytes) -> None:
    """Process 0 tells all others what they `hear`."""
    await _to_all(world.peers, text)


async def hear(world: World, *, deadline_s: float) -> bytes:
    """What process 0 tells; TimeoutError after `deadline_s` seconds."""
    async with asyncio.timeout(deadline_s):
        return await world.peers[0].receive()


def never() -> bool:
    """For who is not asked to stop."""
    return False


async def agreed(world: World, asked: Callable[[], bool], *, deadline_s: float) -> bool:
    """Whether all processes go on; False in all of them where one was asked to stop.

    All call it at the same places of their program, as they do collectives. TimeoutError after
    `deadline_s` seconds, which must cover what one does beyond the others before it, naming the
    process that was waited for.
    """
    heard: list[bytes] = []
    try:
        async with asyncio.timeout(deadline_s):
            if world.process_id:
                await world.peers[0].send(ASKED if asked() else READY)
                return await world.peers[0].receive() == GO
            await _hear_all(world.peers, heard, "going on", READY, ASKED)
    except TimeoutError as error:
        raise TimeoutError(
            f"process {world.process_id} of {world.size} waited {deadline_s:g} s for "
            f"{world.peers[len(heard)].name} to say whether all go on"
        ) from error
    goes_on = not asked() and ASKED not in heard
    await tell(world, GO if goes_on else STOP_NOW)
    return goes_on


async def shared_take(
    world: World,
    take: Take,
    update: int,
    *,
    deadline_s: float,
    asked: Callable[[], bool] = never,
    ask: Callable[[], object] = never,
) -> Taken | None:
    """What process 0 takes for `update`, in every process; None in all of them means stop.

    `asked` is whether this process was asked to stop; where that is another than process 0, this
    batch is still trained on, and process 0 calls `ask`, so that it takes no more.

    Returns in process 0 only when every other process has the batch and found it to be the one
    announced: a process that is at another update, or whose data do not match the membership, fails
    with a ValueError, and process 0 with one that names it. `take` is called in process 0 alone.
    TimeoutError after `deadline_s` seconds, which must cover the taking and what process 0 does
    beyond the others at a push.
    """
    try:
        async with asyncio.timeout(deadline_s) as limit:
            if world.process_id == 0:
                return await _lead(world, await take(update), update, ask)
            return await _follow(world.peers[0], update, asked)
    except TimeoutError as error:
        if not limit.expired():
            raise
        own = f"process {world.process_id} of {world.size}"
        raise TimeoutError(f"{own} has no batch for update {update} in {deadline_s:g} s") from error


async def _lead(
    world: World, taken: Taken | None, update: int, ask: Callable[[], object]
) -> Taken | None:
    if not world.peers:
        return taken
    groups = taken.groups if taken else []
    packed = await asyncio.to_thread(lambda: list(map(pack_group, groups)))
    header = Header(
        kind=BATCH if taken else STOP,
        update=update,
        published_version=taken.published_version if taken else 0,
        groups=tuple(map(name_of, groups)),
        size=sum(map(len, packed)),
    )
    await _to_all(world.peers, encode_header(header), *packed)
    if ASKED in await _answers(world.peers, f"update {update}", READY, ASKED):
        ask()
    return taken


async def _follow(leader: Peer, update: int, asked: Callable[[], bool]) -> Taken | None:
    header = decode_header(await leader.receive())
    packed = [await leader.receive() for _ in header.groups]
    try:
        check_update(header, update)
        groups = unpack_checked(header, packed)
    except ValueError as error:
        await leader.send(str(error).encode())
        raise
    await leader.send(ASKED if asked() else READY)
    return None if header.kind == STOP else Taken(groups, header.published_version)


async def _end_with(peers: Sequence[Peer]) -> NoReturn:
    """Ends this process soon after another one: nothing else ends a wait in a collective."""
    while not (gone := [peer.name for peer in peers if peer.gone]):
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(UNWIND_S)
    text = f"rl-jax: {gone[0]} is gone, and with it the world"
    print(text, file=sys.stderr, flush=True)
    os._exit(LOST)


async def _leave(world: World, deadline_s: float) -> None:
    """Returns when all processes got here."""
    try:
        async with asyncio.timeout(deadline_s):
            if world.process_id == 0:
                await _answers(world.peers, "leaving", LEAVING)
                await _to_all(world.peers, LEAVING)
            else:
                await world.peers[0].send(LEAVING)
                await world.peers[0].receive()
    except TimeoutError as error:
        raise TimeoutError(
            f"process {world.process_id} of {world.size} left, the others did not follow "
            f"within {deadline_s:g} s"
        ) from error


async def _to_all(peers: Sequence[Peer], *frames: bytes) -> None:
    await asyncio.gather(*(peer.send(*frames) for peer in peers))


async def _answers(peers: Sequence[Peer], what: str, *wanted: bytes) -> list[bytes]:
    """What all say. ValueError, naming the first process that answers something else."""
    heard: list[bytes] = []
    await _hear_all(peers, heard, what, *wanted)
    return heard


async def _hear_all(peers: Sequence[Peer], heard: list[bytes], what: str, *wanted: bytes) -> None:
    """As `_answers`; `heard` grows with each answer, so it tells who was waited for."""
    for peer in peers:
        if (answer := await peer.receive()) not in wanted:
            raise ValueError(f"{what}: {peer.name} says: {answer.decode(errors='replace')}")
        heard.append(answer)
