"""A sampler in another process: the same completions, and what happens when one side goes away."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from rl_jax.gateway.protocol import (
    Completion,
    Request,
    RequestFailed,
    SamplerClient,
    SamplerLost,
)
from rl_jax.gateway.sampler_client import SamplerPool, SocketSampler
from rl_jax.gateway.sampler_server import serve_sampler
from rl_jax.sampler.engine import Engine
from rl_jax.trajectories.types import RolloutKey, Segment
from rl_jax.wire.client import HandshakeRefused
from tests.fakes.client import FakeSampler
from tests.fakes.engine import Stepped, key, prompt, request
from tests.fakes.engine import run as run_engine
from tests.fakes.ticks import Ticks
from tests.queues import clock

TOKEN = "secret"


def run[T](main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def whole() -> T:
        async with asyncio.timeout(30):
            return await main()

    return asyncio.run(whole())


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp::0"


def near(address: str, timeout: float = 20.0) -> SocketSampler:
    return SocketSampler(address, token=TOKEN, clock=Ticks(), timeout=timeout)


def served(sampler: SamplerClient, address: str) -> Any:
    return serve_sampler(sampler, applied_at_once, address, token=TOKEN, clock=Ticks())


async def applied_at_once(version: int) -> None:
    """Of a sampler that always has the newest weights."""


@asynccontextmanager
async def over_socket(sampler: SamplerClient, address: str) -> AsyncIterator[SocketSampler]:
    async with served(sampler, address) as at:
        own = near(at)
        yield own
        await own.disconnect()


def speaking(*turns: Any) -> FakeSampler:
    return FakeSampler(lambda key: iter(turns) if turns else repeat((1, 2)))


@dataclass
class Blocked(FakeSampler):
    """Answers no request; says what it was asked and what was cancelled."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, sequence: int, request: Request) -> Completion:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


# --- the same sampler ----------------------------------------------------------------------------


def test_an_engine_behind_a_socket_gives_the_very_same(address: str) -> None:
    """Two requests of two sequences at once: tokens, log-probabilities, versions, segments."""
    asked = [request(prompt(3, 20), 12), request(prompt(4, 9), 6, temperature=0.7)]

    async def converse(
        sampler: SamplerClient, number: int
    ) -> tuple[list[Completion], tuple[Segment, ...]]:
        sequence = await sampler.open(key(number))
        given = [await sampler.generate(sequence, each) for each in asked]
        segments = sampler.segments(sequence)
        await sampler.close(sequence)
        return given, segments

    async def both(sampler: SamplerClient) -> list[Any]:
        return await asyncio.gather(converse(sampler, 1), converse(sampler, 2))

    async def here(engine: Engine, _: Stepped) -> list[Any]:
        return await both(engine)

    async def there(engine: Engine, _: Stepped) -> list[Any]:
        async with over_socket(engine, address) as sampler:
            return await both(sampler)

    assert run_engine(there) == run_engine(here)


def test_greedy_evaluation_and_stop_tokens_travel(address: str) -> None:
    async def main() -> None:
        fake = speaking((5, 6))
        async with over_socket(fake, address) as sampler:
            sequence = await sampler.open(key(1))
            asked = request((1, 2), 9, temperature=0.0, stop=(6, 60), training=False)
            given = await sampler.generate(sequence, asked)
            assert fake.requests == [(key(1), asked)]
            assert given == Completion((5, 6), (-0.125, -0.25), (-0.125, -0.25), (0, 0), "stop")

    run(main)


def test_segments_are_those_of_the_last_completion(address: str) -> None:
    async def main() -> None:
        async with over_socket(speaking(), address) as sampler:
            await sampler.open(key(1))
            sequence = await sampler.open(key(2))
            assert sampler.segments(sequence) == ()
            await sampler.generate(sequence, request((1,)))
            assert sampler.segments(sequence) == (Segment(0, 2, 0, "prefill"),)

    run(main)


def test_a_request_given_up_fails_as_itself_and_others_go_on(address: str) -> None:
    async def main() -> None:
        fake = speaking(RequestFailed("logits not finite"), (1,))
        async with over_socket(fake, address) as sampler:
            sequence = await sampler.open(key(1))
            with pytest.raises(RequestFailed, match="logits not finite"):
                await sampler.generate(sequence, request((1,)))
            assert (await sampler.generate(sequence, request((1,)))).tokens == (1,)

    run(main)


def test_a_sampler_that_stopped_is_a_lost_one(address: str) -> None:
    async def main() -> None:
        async with over_socket(speaking(RuntimeError("the sampler has stopped")), address) as far:
            sequence = await far.open(key(1))
            with pytest.raises(SamplerLost, match="the sampler has stopped"):
                await far.generate(sequence, request((1,)))

    run(main)


def test_loss_of_a_sampler_is_no_failure_of_a_request() -> None:
    assert not issubclass(SamplerLost, RequestFailed)


# --- giving up -----------------------------------------------------------------------------------


def test_cancelling_a_request_cancels_it_in_the_engine(address: str) -> None:
    """And closing gives its pages back."""

    async def main(engine: Engine, steps: Stepped) -> None:
        async with over_socket(engine, address) as sampler:
            room = engine._pages.room(0)
            sequence = await sampler.open(key(1))
            lost = asyncio.create_task(sampler.generate(sequence, request(prompt(1, 20), 150)))

            async def cancel() -> None:
                lost.cancel()

            steps.after[4] = cancel
            await asyncio.wait([lost])
            assert lost.cancelled()
            other = await sampler.open(key(2))
            await sampler.generate(other, request(prompt(2, 5), 3))
            assert engine.sampled_tokens < 20
            assert [s.ended for s in engine._sequences.values()] == [True, False]
            await sampler.close(sequence)
            await sampler.close(other)
            await sampler.close(other)
            await sampler.open(key(3))
            assert len(engine._sequences) == 1 and engine._pages.room(0) < room

    run_engine(main)


def test_an_open_that_nobody_waits_for_holds_no_sequence(tmp_path: Path) -> None:
    """Answered or not when it is given up."""

    async def main() -> None:
        fake = speaking()
        async with over_socket(fake, f"unix:{tmp_path}/s") as sampler:
            for rounds in range(12):
                opening = asyncio.create_task(sampler.open(key(1)))
                for _ in range(rounds):
                    await asyncio.sleep(0)
                opening.cancel()
                await asyncio.wait([opening])
                if not opening.cancelled():
                    await sampler.close(opening.result())
            last = await sampler.open(key(2))
            assert sorted(fake.closed) == list(range(len(fake.opened) - 1))
            await sampler.close(last)
            assert len(fake.opened) > 3, "some reached the sampler"

    run(main)


def test_a_request_ends_at_its_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        fake = Blocked(lambda key: iter(()))
        async with served(fake, f"unix:{tmp_path}/s") as at:
            sampler = near(at, timeout=40)
            sequence = await sampler.open(key(1))
            with pytest.raises(TimeoutError, match=f"generate of {at} was not answered in 40 s"):
                await sampler.generate(sequence, request((1,)))
            await fake.cancelled.wait()
            await sampler.disconnect()

    clock.run(main)


# --- one side goes away --------------------------------------------------------------------------


def test_a_lost_client_leaves_nothing_behind(address: str) -> None:
    async def main(engine: Engine, steps: Stepped) -> None:
        room = engine._pages.room(0)
        async with served(engine, address) as at:
            gone, stays = near(at), near(at)
            kept = await stays.open(key(9))
            for number in range(3):
                await gone.open(key(number))
            running = asyncio.create_task(gone.generate(0, request(prompt(1, 20), 150)))

            async def leave() -> None:
                await gone.disconnect()

            steps.after[3] = leave
            with pytest.raises(SamplerLost):
                await running
            while len(engine._sequences) > 1:
                await asyncio.sleep(0)
            assert (await stays.generate(kept, request(prompt(2, 5), 3))).versions == (0,) * 3
            await stays.disconnect()
        assert not engine._sequences and engine._pages.room(0) == room

    run_engine(main)


def test_loss_of_the_sampler_is_raised_at_once_and_for_good(address: str) -> None:
    """Also when another sampler has taken its place, where numbers begin anew."""

    async def main() -> None:
        fake = Blocked(lambda key: iter(()))
        async with served(fake, address) as at:
            sampler = near(at)
            sequence = await sampler.open(key(1))
            call = asyncio.create_task(sampler.generate(sequence, request((1,))))
            await fake.asked.wait()
        with pytest.raises(SamplerLost, match=f"connection to {at} lost"):
            await call
        assert not sampler.connected
        again = speaking()
        async with served(again, at):
            other = await sampler.open(key(2))
            with pytest.raises(SamplerLost):
                await sampler.generate(sequence, request((1,)))
            await sampler.close(sequence)
            assert (await sampler.generate(other, request((1,)))).tokens == (1, 2)
            assert again.closed == []
            await sampler.disconnect()

    run(main)


def test_a_wrong_token_is_no_lost_sampler(address: str) -> None:
    async def main() -> None:
        async with served(speaking(), address) as at:
            stranger = SocketSampler(at, token="guess", clock=Ticks(), timeout=20)
            with pytest.raises(HandshakeRefused, match="wrong token"):
                await stranger.open(key(1))

    run(main)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.call("open", 0, ["t", 1, 2, 0], timeout=9), "sequence 0 is open"),
        (lambda c: c.call("open", 1, ["t", -1, 2, 0], timeout=9), "key"),
        (lambda c: c.call("generate", 5, [], timeout=9), "sequence 5 is not open"),
        (lambda c: c.call("generate", 0, [], timeout=9), "request: a list of 6"),
    ],
)
def test_what_makes_no_sense_is_refused(
    address: str, ask: Callable[[Any], Awaitable[object]], said: str
) -> None:
    async def main() -> None:
        async with over_socket(speaking(), address) as sampler:
            await sampler.open(key(1))
            with pytest.raises(ValueError, match=said):
                await ask(sampler._client.connection)

    run(main)


# --- pool ----------------------------------------------------------------------------------------


@asynccontextmanager
async def pooled(*addresses: str, timeout: float = 20.0) -> AsyncIterator[SamplerPool]:
    samplers = tuple(near(address) for address in addresses)
    pool = SamplerPool(samplers, timeout=timeout)
    running = asyncio.create_task(pool.run())
    yield pool
    running.cancel()
    await asyncio.wait([running])
    for sampler in samplers:
        await sampler.disconnect()


def test_a_sequence_opens_where_fewest_are_open(tmp_path: Path) -> None:
    async def main() -> None:
        fakes = [speaking(), speaking(), speaking()]
        at = [f"unix:{tmp_path}/{i}" for i in range(3)]
        async with AsyncExitStack() as stack:
            for fake, address in zip(fakes, at, strict=True):
                await stack.enter_async_context(served(fake, address))
            async with pooled(*at) as pool:
                for sampler in pool._samplers:
                    await sampler.connect(20)
                opened = [await pool.open(key(i)) for i in range(6)]
                assert [len(f.opened) for f in fakes] == [2, 2, 2]
                for number in (opened[1], opened[4]):
                    await pool.close(number)
                await pool.close(opened[1])
                more = [await pool.open(key(i)) for i in range(2)]
                assert [len(f.opened) for f in fakes] == [2, 4, 2]
                assert len({*opened, *more}) == 8
                await pool.generate(more[0], request((7,)))
                assert fakes[1].requests == [(key(0), request((7,)))]
                assert pool.segments(more[0]) == (Segment(0, 3, 0, "prefill"),)

    run(main)


def test_a_dead_sampler_is_passed_over_and_used_again_when_it_is_back(address: str) -> None:
    async def main() -> None:
        stays, dies = speaking(), speaking()
        async with served(stays, address) as first:
            async with served(dies, address.replace("/s", "/t")) as second:
                pool = SamplerPool((near(first), near(second)), timeout=20)
                running = asyncio.create_task(pool.run())
                for sampler in pool._samplers:
                    await sampler.connect(20)
                opened = [await pool.open(key(i)) for i in range(4)]
                assert len(stays.opened) == len(dies.opened) == 2
            with pytest.raises(SamplerLost):
                await pool.generate(opened[1], request((1,)))
            for number in opened[1::2]:
                await pool.close(number)
            for number in range(3):
                await pool.open(key(number))
            assert len(stays.opened) == 5
            back = speaking()
            async with served(back, second):
                await pool._samplers[1].connect(20)
                assert await pool.generate(await pool.open(key(7)), request((1,)))
                assert back.opened == [key(7)]
                running.cancel()
                for sampler in pool._samplers:
                    await sampler.disconnect()

    run(main)


SAMPLER = """
import asyncio, sys
from itertools import repeat
from rl_jax.gateway.sampler_server import serve_sampler
from tests.fakes.client import FakeSampler
from tests.fakes.ticks import Ticks

class Sampler(FakeSampler):
    async def applied(self, version):
        pass

    async def generate(self, sequence, request):
        if request.max_new_tokens > 1:
            print("asked", flush=True)
            await asyncio.Event().wait()
        return await super().generate(sequence, request)

async def main():
    own = Sampler(lambda key: repeat((4,)))
    async with serve_sampler(own, own.applied, sys.argv[1], token="secret", clock=Ticks()):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_sampler_is_lost_at_once_and_its_successor_is_used(tmp_path: Path) -> None:
    """SIGKILL; the next process takes over the address that it left behind."""

    async def started(address: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SAMPLER, address),
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
        )

    async def main() -> None:
        at = f"unix:{tmp_path}/s"
        async with pooled(at) as pool:
            first = await started(at)
            sequence = await pool.open(key(1))
            call = asyncio.create_task(pool.generate(sequence, request((1,), 2)))
            assert first.stdout and await first.stdout.readline() == b"asked\n"
            os.kill(first.pid, signal.SIGKILL)
            with pytest.raises(SamplerLost):
                await call
            await first.wait()
            second = await started(at)
            again = await pool.open(key(1))
            assert (await pool.generate(again, request((1,), 1))).tokens == (4,)
            second.kill()
            await second.wait()

    run(main)


def test_open_waits_for_a_sampler_to_come(address: str) -> None:
    async def main() -> None:
        async with served(speaking(), address) as at:
            pass
        async with pooled(at) as pool:
            opening = asyncio.create_task(pool.open(key(1)))
            await asyncio.sleep(0)
            fake = speaking()
            async with served(fake, at):
                await opening
                assert fake.opened == [key(1)]

    run(main)


def test_open_gives_up_at_its_deadline_and_names_all(tmp_path: Path) -> None:
    async def main() -> None:
        at = [f"unix:{tmp_path}/{name}" for name in "ab"]
        async with pooled(*at, timeout=50) as pool:
            with pytest.raises(TimeoutError) as caught:
                await pool.open(key(1))
            assert str(caught.value) == f"no sampler connected in 50 s: {at[0]}, {at[1]}"
            assert clock.now() == pytest.approx(50)

    clock.run(main)


def test_a_sampler_lost_while_it_opens_is_replaced_by_another(tmp_path: Path) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        class Full(FakeSampler):
            async def open(self, key: RolloutKey) -> int:
                entered.set()
                return await asyncio.get_running_loop().create_future()

        at = [f"unix:{tmp_path}/{i}" for i in range(2)]
        other = speaking()
        async with pooled(*at) as pool:
            async with served(Full(lambda key: iter(())), at[0]):
                opening = asyncio.create_task(pool.open(key(1)))
                await entered.wait()
            async with served(other, at[1]):
                await opening
                assert other.opened == [key(1)]
        assert list(pool._open.values()) == [0, 1]

    run(main)


def test_a_pool_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool needs a sampler"):
        SamplerPool((), timeout=1)
