"""[H] The trainer as a world of processes: one global mesh, batches from process 0.

All processes run the same programs in the same order. Only process 0 has a queue and a store; it
tells the others what it took over connections of its own (channel.py) and not by a collective: a
socket has a deadline and an end of file, a collective has neither. Every process gets the whole
batch, so process 0 sends it size - 1 times.

While a world stands, TERM ends no process: jax makes a notice of it that `stop_requested` reads.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import jax
from jax.experimental import multihost_utils

from rl_jax.trainer.channel import Peer, connected
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
from rl_jax.trajectories.codec import MAX_BYTES, pack_group

LEAVING = b"it has left the world"


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
        others to leave too. A process that leaves by an exception closes its connections, which the
        others hear; one that waits in a collective hears nothing, and jax aborts it after
        `heartbeat_s` seconds (the peer is dead) or `leave_s` (it waits to leave).
        """
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
            yield world
            await _leave(world, leave_s)
            await asyncio.to_thread(jax.distributed.shutdown)


async def shared_take(world: World, take: Take, update: int, *, deadline_s: float) -> Taken | None:
    """What process 0 takes for `update`, in every process; None in all of them means stop.

    Returns in process 0 only when every other process has the batch and found it to be the one
    announced: a process that is at another update, or whose data do not match the membership, fails
    with a ValueError, and process 0 with one that names it. `take` is called in process 0 alone.
    TimeoutError after `deadline_s` seconds, which must cover the taking and what process 0 does
    beyond the others at a push.
    """
    try:
        async with asyncio.timeout(deadline_s) as limit:
            if world.process_id == 0:
                return await _lead(world, await take(update), update)
            return await _follow(world.peers[0], update)
    except TimeoutError as error:
        if not limit.expired():
            raise
        own = f"process {world.process_id} of {world.size}"
        raise TimeoutError(f"{own} has no batch for update {update} in {deadline_s:g} s") from error


def stop_requested(update: int) -> bool:
    """Whether to stop ahead of `update` because some process got a TERM; always False alone.

    The same answer in every process at the same update, if all ask at every update in turn.
    """
    return multihost_utils.reached_preemption_sync_point(update)


async def _lead(world: World, taken: Taken | None, update: int) -> Taken | None:
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
    await _all_say(world.peers, b"", f"update {update}")
    return taken


async def _follow(leader: Peer, update: int) -> Taken | None:
    header = decode_header(await leader.receive())
    packed = [await leader.receive(MAX_BYTES) for _ in header.groups]
    try:
        check_update(header, update)
        groups = unpack_checked(header, packed)
    except ValueError as error:
        await leader.send(str(error).encode())
        raise
    await leader.send(b"")
    return None if header.kind == STOP else Taken(groups, header.published_version)


async def _leave(world: World, deadline_s: float) -> None:
    """Returns when all processes got here."""
    try:
        async with asyncio.timeout(deadline_s):
            if world.process_id == 0:
                await _all_say(world.peers, LEAVING, "leaving")
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


async def _all_say(peers: Sequence[Peer], wanted: bytes, what: str) -> None:
    """ValueError, naming the first process that answers otherwise."""
    for peer in peers:
        if (answer := await peer.receive()) != wanted:
            raise ValueError(f"{what}: {peer.name} says: {answer.decode(errors='replace')}")
