"""[H] A sampler for other processes. Clients number their sequences themselves, so one that gave up
waiting for `open` can still close what came of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from rl_jax.gateway.messages import decode_request, encode_completion, encode_segments
from rl_jax.gateway.protocol import RequestFailed, SamplerClient, SamplerLost
from rl_jax.trajectories.codec import decode_key
from rl_jax.wire.connection import Connection, Methods
from rl_jax.wire.frames import Clock
from rl_jax.wire.server import serve

ERRORS = (RequestFailed, SamplerLost, ValueError)
"""What travels as itself."""


Applied = Callable[[int], Awaitable[None]]
"""Returns when the sampler samples with this version, or a newer one."""


def serve_sampler(
    sampler: SamplerClient, applied: Applied, address: str, *, token: str, clock: Clock
) -> AbstractAsyncContextManager[str]:
    """`async with`: serves `sampler` until left; gives the address, with the real port.

    Sequences of a client whose connection is lost are closed. An OSError names an address in use.
    """
    session = partial(_session, sampler, applied)
    return serve(address, session, token=token, clock=clock, errors=ERRORS)


@asynccontextmanager
async def _session(
    sampler: SamplerClient, applied: Applied, peer: Connection
) -> AsyncIterator[Methods]:
    sequences: dict[int, int] = {}
    """The client's number -> the sampler's."""

    async def open(number: int, key: object) -> None:
        if number in sequences:
            raise ValueError(f"sequence {number} is open")
        try:
            sequences[number] = await sampler.open(decode_key(key))
        except RuntimeError as error:
            raise SamplerLost(str(error)) from error

    async def generate(number: int, request: object) -> list[Any]:
        if number not in sequences:
            raise ValueError(f"sequence {number} is not open")
        own = sequences[number]
        try:
            completion = await sampler.generate(own, decode_request(request))
        except RuntimeError as error:
            # The sampler has stopped. Its clients outlive it.
            raise SamplerLost(str(error)) from error
        return [encode_completion(completion), encode_segments(sampler.segments(own))]

    async def close(number: int) -> None:
        own = sequences.pop(number, None)
        if own is not None:
            await sampler.close(own)

    try:
        yield {"open": open, "generate": generate, "close": close, "applied": applied}
    finally:
        for own in sequences.values():
            await sampler.close(own)
