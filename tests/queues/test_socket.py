"""What only a queue between processes can get wrong: lost, repeated and late messages."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_jax.queues.base import Queue, QueueClosed, QueueFailed, SharedQueue
from rl_jax.queues.memory import MemoryQueue
from rl_jax.queues.socket import ERRORS, QueueServer, SocketQueue
from rl_jax.staleness import Take
from rl_jax.trajectories.codec import encode_group
from rl_jax.trajectories.types import Group
from rl_jax.wire import frames
from rl_jax.wire.address import dial
from rl_jax.wire.client import Client
from rl_jax.wire.connection import ConnectionLost
from rl_jax.wire.frames import Call
from tests.fakes.ticks import Ticks
from tests.queues.clock import now, run, settle
from tests.trajectories.build import group

TOKEN = "secret"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/q"


def server(queue: Queue) -> QueueServer:
    return QueueServer(queue, token=TOKEN, clock=Ticks())


def far(address: str, **rest: Any) -> SocketQueue:
    return SocketQueue(address, token=TOKEN, clock=Ticks(), **rest)


def raw(address: str) -> Client:
    return Client(address, token=TOKEN, clock=Ticks(), errors=ERRORS, methods={})


def take_all(group: Group, published: int) -> Take:
    return Take()


def queued(queue: MemoryQueue) -> list[int]:
    return [g["prompt"] for g in queue.get_state()["queued"]]


def test_both_are_queues_but_only_one_has_its_content_at_hand(address: str) -> None:
    assert isinstance(MemoryQueue(1, lambda: 0), Queue)
    assert isinstance(far(address), SharedQueue)


def test_a_local_failure_keeps_its_cause() -> None:
    async def main() -> None:
        queue = MemoryQueue(1, lambda: 0)
        error = RuntimeError("collector died")
        queue.fail(error)
        with pytest.raises(QueueFailed) as caught:
            await queue.put(group(0), timeout=1)
        assert caught.value.__cause__ is error

    run(main)


# --- puts ----------------------------------------------------------------------------------------


def test_a_put_whose_answer_was_lost_enters_once(address: str) -> None:
    """The connection is cut while the group is being written; the put is sent again by itself."""

    async def main() -> None:
        written, writing = asyncio.Event(), asyncio.Event()
        wrote: list[int] = []

        async def on_put(group: Group) -> None:
            wrote.append(group.prompt)
            writing.set()
            await written.wait()

        queue = MemoryQueue(4, lambda: 0, on_put)
        async with server(queue).serve(address):
            own = far(address)
            put = asyncio.create_task(own.put(group(7), timeout=60))
            await writing.wait()
            connection = own._client.connection
            assert connection
            connection.abort()
            await connection.lost.wait()
            await settle()
            assert queued(queue) == [7], "it goes on without its connection"
            written.set()
            await put
            assert queued(queue) == [7] and wrote == [7]
            await own.disconnect()

    run(main)


@pytest.mark.parametrize("again", ["at once", "when it is done"])
def test_a_put_that_comes_twice_enters_once(address: str, again: str) -> None:
    async def main() -> None:
        queue = MemoryQueue(1, lambda: 0)
        async with server(queue).serve(address):
            client = raw(address)
            peer = await client.connect(5)
            arguments = ("put", "id", encode_group(group(1)), 30.0)
            if again == "at once":
                await asyncio.gather(*(peer.call(*arguments, timeout=40) for _ in range(3)))
            else:
                for _ in range(3):
                    await peer.call(*arguments, timeout=40)
            assert queued(queue) == [1] and now() == 0
            await client.close()

    run(main)


def test_a_put_that_failed_may_come_again(address: str) -> None:
    async def main() -> None:
        failing = [True]

        async def on_put(_: Group) -> None:
            if failing.pop():
                raise OSError("disk full")

        queue = MemoryQueue(2, lambda: 0, on_put)
        async with server(queue).serve(address):
            client = raw(address)
            peer = await client.connect(5)
            arguments = ("put", "id", encode_group(group(1)), 30.0)
            with pytest.raises(OSError, match="disk full"):
                await peer.call(*arguments, timeout=40)
            failing.append(False)
            await peer.call(*arguments, timeout=40)
            assert queued(queue) == [1]
            await client.close()

    run(main)


def test_a_message_cut_anywhere_puts_nothing(address: str) -> None:
    async def main() -> None:
        queue = MemoryQueue(4, lambda: 0)
        whole = frames.encode(Call(1, 0, "put", ["id", encode_group(group(1)), 5.0]))
        async with server(queue).serve(address):
            for cut in (1, 4, 5, len(whole) // 2, len(whole) - 1):
                _, writer = await dial(address)
                writer.write(frames.hello(TOKEN) + whole[:cut])
                writer.close()
                await settle()
            assert queued(queue) == []
            _, writer = await dial(address)
            writer.write(frames.hello(TOKEN) + whole)
            writer.close()
            await settle()
            assert queued(queue) == [1]

    run(main)


def test_a_cancelled_put_waits_no_more_and_enters_not(address: str) -> None:
    async def main() -> None:
        queue = MemoryQueue(1, lambda: 0)
        async with server(queue).serve(address):
            own = far(address)
            await own.put(group(0), timeout=9)
            put = asyncio.create_task(own.put(group(1), timeout=90))
            await settle()
            put.cancel()
            await settle()
            await queue.get(1, take_all, step=0, timeout=1)
            await settle()
            assert put.cancelled() and queued(queue) == []
            await own.disconnect()

    run(main)


def test_a_put_waits_for_a_server_to_come_and_keeps_its_deadline(address: str) -> None:
    async def main() -> None:
        queue, own = MemoryQueue(1, lambda: 0), far(address)
        put = asyncio.create_task(own.put(group(0), timeout=60))
        await asyncio.sleep(30)
        async with server(queue).serve(address):
            await put
            await own.disconnect()
        with pytest.raises(TimeoutError, match=f"no connection to {address} in 20 s"):
            await own.put(group(1), timeout=20)
        assert now() == pytest.approx(50, abs=1)

    run(main)


PRODUCER = """
import asyncio, sys
from rl_jax.queues.socket import SocketQueue
from tests.fakes.ticks import Ticks
from tests.trajectories.build import group

async def main():
    queue = SocketQueue(sys.argv[1], token="secret", clock=Ticks())
    for i in range(1000):
        await queue.put(group(i), timeout=60)
        print(i, flush=True)

asyncio.run(main())
"""


def test_what_a_killed_process_was_told_it_put_is_there(address: str) -> None:
    """SIGKILL in the midst of its puts: all it heard of and at most one more, each once."""

    async def main() -> None:
        queue = MemoryQueue(1000, lambda: 0)
        async with server(queue).serve(address):
            producer = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                PRODUCER,
                address,
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
            )
            assert producer.stdout
            for _ in range(20):
                await producer.stdout.readline()
            os.kill(producer.pid, signal.SIGKILL)
            told = 20 + len((await producer.stdout.read()).split())
            await producer.wait()
            own = far(address)
            await own.get_state()  # what was sent before has arrived by now
            there = queued(queue)
            assert there == list(range(len(there))) and told <= len(there) <= told + 1
            await own.disconnect()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


# --- the rest ------------------------------------------------------------------------------------


def test_what_is_said_without_a_connection_is_said_first_on_the_next(address: str) -> None:
    async def main() -> None:
        queue, own = MemoryQueue(4, lambda: 0), far(address)
        own.close()
        async with server(queue).serve(address):
            with pytest.raises(QueueClosed):
                await own.put(group(0), timeout=9)
            await own.disconnect()

    run(main)


def test_what_was_said_meanwhile_arrives_when_the_connection_is_kept(address: str) -> None:
    """Without another call; and what means the same is said once."""

    async def main() -> None:
        class Counting(MemoryQueue):
            asked = 0

            def reconsider(self) -> None:
                self.asked += 1
                super().reconsider()

        queue, own = Counting(4, lambda: 0), far(address)
        running = asyncio.create_task(own.run())
        for _ in range(100):
            own.reconsider()
        own.fail(RuntimeError("collector died"))
        async with server(queue).serve(address):
            await asyncio.sleep(1)
            assert queue.asked == 1
            with pytest.raises(QueueFailed, match="RuntimeError: collector died"):
                await queue.put(group(0), timeout=1)
            running.cancel()
            await own.disconnect()

    run(main)


def test_a_get_whose_connection_is_lost_says_so_and_takes_nothing(address: str) -> None:
    async def main() -> None:
        queue, own = MemoryQueue(4, lambda: 0), far(address)
        async with server(queue).serve(address):
            getting = asyncio.create_task(own.get(1, take_all, step=0, timeout=60))
            await settle()
            await own.disconnect()
            with pytest.raises(ConnectionLost):
                await getting
            await queue.put(group(0), timeout=1)
            await settle()
            assert queued(queue) == [0] and queue.get_state()["unacked"] == []

    run(main)


def test_a_fault_of_an_admission_ends_its_get_alone(address: str) -> None:
    async def main() -> None:
        def broken(group: Group, published: int) -> Take:
            raise ValueError("not like this")

        queue, own = MemoryQueue(4, lambda: 0), far(address)
        async with server(queue).serve(address):
            await own.put(group(0), timeout=1)
            with pytest.raises(ValueError, match="not like this"):
                await own.get(1, broken, step=0, timeout=60)
            assert now() == 0
            assert len(await own.get(1, take_all, step=0, timeout=60)) == 1
            await own.disconnect()

    run(main)


def test_an_answer_is_worth_nothing_under_another_version(address: str) -> None:
    """A push while the question is under way: it is asked again, and the second answer counts."""

    async def main() -> None:
        published, asked = [0], []
        queue = MemoryQueue(4, lambda: published[0])

        def admit(group: Group, version: int) -> Take:
            asked.append(version)
            published[0] = 1
            return Take()

        own = far(address)
        async with server(queue).serve(address):
            await own.put(group(0), timeout=1)
            await own.get(1, admit, step=0, timeout=60)
            assert asked == [0, 1]
            await own.disconnect()

    run(main)


@pytest.mark.parametrize("answer", [["maybe"], ["wait", 1.0, ["wait", 1.0, ["take"]]], "take", []])
def test_a_foreign_decision_is_refused(address: str, answer: object) -> None:
    async def main() -> None:
        queue = MemoryQueue(4, lambda: 0)
        async with server(queue).serve(address):
            methods = {"admit": lambda *_: [answer]}
            client = Client(address, token=TOKEN, clock=Ticks(), errors=ERRORS, methods=methods)
            peer = await client.connect(5)
            await queue.put(group(0), timeout=1)
            with pytest.raises(ValueError, match="is no decision on a group"):
                await peer.call("get", 0, 1, 0, 9.0, timeout=20)
            await client.close()

    run(main)
