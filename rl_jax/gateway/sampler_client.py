"""[H] Samplers of other processes: one behind a socket, and a pool of those."""

import asyncio
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from rl_jax.gateway.messages import decode_completion, decode_segments, encode_request
from rl_jax.gateway.protocol import Completion, Request, SamplerLost
from rl_jax.gateway.sampler_server import ERRORS
from rl_jax.trajectories.types import RolloutKey, Segment
from rl_jax.wire.client import Client
from rl_jax.wire.connection import Connection, ConnectionLost
from rl_jax.wire.frames import Clock


@dataclass
class _Sequence:
    connection: Connection
    segments: tuple[Segment, ...] = ()


class SocketSampler:
    """A `SamplerClient` over the sampler served at `address`.

    A sequence lives on the connection it was opened on: when that is lost, requests of the sequence
    raise SamplerLost. `timeout` bounds every call, in seconds.
    """

    def __init__(self, address: str, *, token: str, clock: Clock, timeout: float) -> None:
        self.address = address
        self._client = Client(address, token=token, clock=clock, errors=ERRORS, methods={})
        self._timeout = timeout
        self._numbers = itertools.count()
        self._sequences: dict[int, _Sequence] = {}

    @property
    def connected(self) -> bool:
        return self._client.connection is not None

    async def connect(self, timeout: float) -> None:
        """Tries for `timeout` seconds; TimeoutError, HandshakeRefused."""
        await self._client.connect(timeout)

    async def run(self) -> None:
        """Keeps a connection until cancelled."""
        await self._client.keep()

    async def disconnect(self) -> None:
        """The sampler closes all sequences of this client."""
        await self._client.close()

    async def open(self, key: RolloutKey) -> int:
        """Connects where there is no connection; TimeoutError where there is no sampler."""
        connection = await self._client.connect(self._timeout)
        number = next(self._numbers)
        self._sequences[number] = _Sequence(connection)
        try:
            await connection.call("open", number, list(key), timeout=self._timeout)
        except BaseException as error:
            # It may have been opened all the same.
            await self.close(number)
            if isinstance(error, ConnectionLost):
                raise SamplerLost(str(error)) from error
            raise
        return number

    async def generate(self, sequence: int, request: Request) -> Completion:
        own = self._sequences[sequence]
        try:
            completion, segments = await own.connection.call(
                "generate", sequence, encode_request(request), timeout=self._timeout
            )
        except ConnectionLost as error:
            raise SamplerLost(str(error)) from error
        own.segments = decode_segments(segments)
        return decode_completion(completion)

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        """As they were at the end of the sequence's last completion."""
        return self._sequences[sequence].segments

    async def close(self, sequence: int) -> None:
        """Does not wait for the pages; whatever is asked of the sampler next finds them free."""
        own = self._sequences.pop(sequence, None)
        if own is not None and not own.connection.lost.is_set():
            own.connection.tell("close", sequence)

    async def applied(self, version: int) -> None:
        """Returns when the sampler samples with `version`, or a newer one; connects where there is
        no connection, and again where it is lost."""
        while True:
            connection = await self._client.connect(self._timeout)
            try:
                return await connection.call("applied", version, timeout=self._timeout)
            except ConnectionLost:
                continue


class _Place(NamedTuple):
    sampler: SocketSampler
    sequence: int


class SamplerPool:
    """A `SamplerClient` over several samplers: a sequence is opened where fewest are open, among
    those that are connected. `run` connects them, and again when they come back.

    `timeout` bounds the wait for a sampler, in seconds.
    """

    def __init__(self, samplers: tuple[SocketSampler, ...], *, timeout: float) -> None:
        if not samplers:
            raise ValueError("a pool needs a sampler")
        self._samplers, self._timeout = samplers, timeout
        self._numbers = itertools.count()
        self._places: dict[int, _Place] = {}
        self._open = dict.fromkeys(samplers, 0)

    async def run(self) -> None:
        """Until cancelled; HandshakeRefused, in a group, where a sampler refuses the token."""
        async with asyncio.TaskGroup() as tasks:
            for sampler in self._samplers:
                tasks.create_task(sampler.run())

    async def open(self, key: RolloutKey) -> int:
        """TimeoutError where no sampler was there in time."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        while True:
            sampler = await self._emptiest(deadline)
            self._open[sampler] += 1
            try:
                place = _Place(sampler, await sampler.open(key))
            except BaseException as error:
                self._open[sampler] -= 1
                if isinstance(error, SamplerLost) and clock() < deadline:
                    continue
                raise
            number = next(self._numbers)
            self._places[number] = place
            return number

    async def generate(self, sequence: int, request: Request) -> Completion:
        sampler, own = self._places[sequence]
        return await sampler.generate(own, request)

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        sampler, own = self._places[sequence]
        return sampler.segments(own)

    async def close(self, sequence: int) -> None:
        place = self._places.pop(sequence, None)
        if place is not None:
            self._open[place.sampler] -= 1
            await place.sampler.close(place.sequence)

    async def applied(self, version: int) -> None:
        """Returns when every sampler samples with `version`, or a newer one."""
        await asyncio.gather(*(sampler.applied(version) for sampler in self._samplers))

    async def _emptiest(self, deadline: float) -> SocketSampler:
        while not (connected := [s for s in self._samplers if s.connected]):
            await self._one_connected(deadline - asyncio.get_running_loop().time())
        return min(connected, key=lambda sampler: self._open[sampler])

    async def _one_connected(self, timeout: float) -> None:
        """Returns when there is a sampler; TimeoutError names all."""
        tries = [asyncio.create_task(sampler.connect(timeout)) for sampler in self._samplers]
        try:
            for first in asyncio.as_completed(tries):
                try:
                    return await first
                except TimeoutError:
                    continue
        finally:
            for task in tries:
                task.cancel()
        addresses = ", ".join(sampler.address for sampler in self._samplers)
        raise TimeoutError(f"no sampler connected in {self._timeout:g} s: {addresses}")
