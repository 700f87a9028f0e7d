"""Calls between two peers over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rl_jax.wire import frames
from rl_jax.wire.address import dial
from rl_jax.wire.client import HandshakeRefused
from rl_jax.wire.connection import Connection, ConnectionLost
from rl_jax.wire.frames import Call, RemoteError, Result
from rl_jax.wire.server import serve
from tests.fakes.ticks import Ticks
from tests.queues import clock
from tests.wire.peers import TOKEN, Known, connected, made, say, served


def run[T](main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    async def whole() -> T:
        async with asyncio.timeout(30):
            return await main()

    return asyncio.run(whole())


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp::0"


@pytest.fixture
def unix(tmp_path: Path) -> str:
    """For tests under the jumping clock."""
    return f"unix:{tmp_path}/s"


# --- calls ---------------------------------------------------------------------------------------


def test_many_calls_at_a_time_each_get_their_own_answer(address: str) -> None:
    async def main() -> None:
        gates = [asyncio.Event() for _ in range(50)]

        async def double(number: int) -> int:
            await gates[number].wait()
            return 2 * number

        async with served(address, {"double": double}) as at, connected(at) as peer:
            calls = [asyncio.create_task(peer.call("double", i, timeout=20)) for i in range(50)]
            for gate in reversed(gates):
                gate.set()
                await asyncio.sleep(0)
            assert await asyncio.gather(*calls) == [2 * i for i in range(50)]

    run(main)


def test_a_long_call_blocks_no_other(address: str) -> None:
    async def main() -> None:
        never = asyncio.Event()
        methods = {"long": never.wait, "short": lambda: "done"}
        async with served(address, methods) as at, connected(at) as peer:
            long = asyncio.create_task(peer.call("long", timeout=20))
            assert await peer.call("short", timeout=20) == "done"
            assert not long.done()
            never.set()
            assert await long is True

    run(main)


def test_what_is_told_and_called_takes_effect_in_order(address: str) -> None:
    async def main() -> None:
        log: list[int] = []

        async def call(number: int) -> list[int]:
            log.append(number)
            await asyncio.sleep(0)
            return list(log)

        methods = {"tell": log.append, "call": call}
        async with served(address, methods) as at, connected(at) as peer:
            first = asyncio.create_task(peer.call("call", 0, timeout=20))
            await asyncio.sleep(0)
            for number in range(1, 100):
                peer.tell("tell", number)
            assert await peer.call("call", 100, timeout=20) == list(range(101))
            await first

    run(main)


def test_the_server_calls_back_in_the_middle_of_a_call(address: str) -> None:
    async def main() -> None:
        @asynccontextmanager
        async def session(peer: Connection) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
            async def ask(question: str) -> str:
                return await peer.call("answer", question, timeout=20) + "!"

            yield {"ask": ask}

        async with (
            serve(address, session, token=TOKEN, clock=Ticks(), errors=()) as at,
            connected(at, {"answer": str.upper}) as peer,
        ):
            assert await peer.call("ask", "so", timeout=20) == "SO!"

    run(main)


def test_large_messages_pass_both_ways_at_once(address: str) -> None:
    """Far above what the sockets hold, so both sides must read while they write."""

    async def main() -> None:
        data = bytes(range(256)) * (1 << 14)
        async with served(address, {"echo": lambda x: x}) as at, connected(at) as peer:
            calls = (peer.call("echo", data, timeout=20) for _ in range(4))
            assert await asyncio.gather(*calls) == [data] * 4

    run(main)


def test_numbers_of_the_clocks_grow_along_every_message(address: str) -> None:
    async def main() -> None:
        here, there = Ticks(100), Ticks(7)
        seen: list[int] = []
        methods = {"now": lambda: seen.append(there.now)}
        async with served(address, methods, there) as at, connected(at, clock=here) as peer:
            await peer.call("now", timeout=20)
            assert seen == [101], "the server knows of the call's number before the method runs"
            assert here.now == 102, "and the client of the answer's"

    run(main)


# --- errors --------------------------------------------------------------------------------------


def test_errors_are_raised_again_at_the_caller(address: str) -> None:
    async def main() -> None:
        class Unknown(Exception):
            pass

        async def broken(which: str) -> None:
            raise {"known": Known("this way"), "unknown": Unknown("that way")}[which]

        async with served(address, {"broken": broken}) as at, connected(at) as peer:
            with pytest.raises(Known, match=r"^this way$"):
                await peer.call("broken", "known", timeout=20)
            with pytest.raises(RemoteError, match=r"^Unknown: that way$"):
                await peer.call("broken", "unknown", timeout=20)
            with pytest.raises(RemoteError, match="KeyError"):
                await peer.call("broken", "else", timeout=20)
            with pytest.raises(ValueError, match="there is no method 'missing'"):
                await peer.call("missing", timeout=20)
            with pytest.raises(RemoteError, match="TypeError"):
                await peer.call("broken", timeout=20)

    run(main)


def test_an_answer_that_cannot_be_sent_is_an_error_of_the_call(address: str) -> None:
    async def main() -> None:
        async with served(address, {"odd": object}) as at, connected(at) as peer:
            with pytest.raises(ValueError, match="cannot be sent"):
                await peer.call("odd", timeout=20)
            with pytest.raises(ValueError, match="cannot be sent"):
                await peer.call("odd", object(), timeout=20)

    run(main)


class Waiting:
    """A method that waits until it is cancelled, and says so."""

    def __init__(self) -> None:
        self.entered, self.cancelled = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_a_deadline_names_method_and_peer_and_cancels_there(unix: str) -> None:
    async def main() -> None:
        waiting = Waiting()
        async with served(unix, {"wait": waiting.wait}), connected(unix) as peer:
            with pytest.raises(TimeoutError) as caught:
                await peer.call("wait", timeout=300)
            assert str(caught.value) == f"wait of {unix} was not answered in 300 s"
            assert clock.now() == 300
            await waiting.cancelled.wait()

    clock.run(main)


def test_a_cancelled_call_is_cancelled_there(address: str) -> None:
    async def main() -> None:
        waiting = Waiting()
        async with served(address, {"wait": waiting.wait}) as at, connected(at) as peer:
            call = asyncio.create_task(peer.call("wait", timeout=20))
            await waiting.entered.wait()
            call.cancel()
            await waiting.cancelled.wait()
            with pytest.raises(asyncio.CancelledError):
                await call

    run(main)


def test_a_method_that_ends_as_cancelled_by_itself_is_an_error(address: str) -> None:
    async def main() -> None:
        async def give_up() -> None:
            raise asyncio.CancelledError("by itself")

        async with served(address, {"give_up": give_up}) as at, connected(at) as peer:
            with pytest.raises(RemoteError, match="CancelledError: by itself"):
                await peer.call("give_up", timeout=20)

    run(main)


# --- the connection ------------------------------------------------------------------------------


def test_a_lost_connection_fails_what_is_under_way_and_a_new_one_serves_what_follows(
    address: str,
) -> None:
    async def main() -> None:
        waiting = Waiting()
        methods = {"wait": waiting.wait, "echo": lambda x: x}
        async with served(address, methods) as at:
            client = made(at)
            old = await client.connect(20)
            calls = [asyncio.create_task(old.call("wait", timeout=1e6)) for _ in range(3)]
            await waiting.entered.wait()
        for call in calls:
            with pytest.raises(ConnectionLost, match=f"connection to {at} lost"):
                await call
        assert waiting.cancelled.is_set() and client.connection is None
        with pytest.raises(ConnectionLost):
            await old.call("echo", 1, timeout=20)
        with pytest.raises(ConnectionLost):
            old.tell("echo", 1)

        coming = asyncio.create_task(client.connect(20))
        await asyncio.sleep(0)
        async with served(at, methods):
            new = await coming
            assert new is not old and await client.connect(0) is new
            assert await new.call("echo", 1, timeout=20) == 1
            await client.close()

    run(main)


def test_keep_connects_again(address: str) -> None:
    async def main() -> None:
        arrived: asyncio.Queue[Connection] = asyncio.Queue()

        @asynccontextmanager
        async def session(peer: Connection) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
            arrived.put_nowait(peer)
            yield {}

        where = address
        client = None
        for _ in range(3):
            async with serve(where, session, token=TOKEN, clock=Ticks(), errors=()) as where:
                if client is None:
                    client = made(where)
                    keeping = asyncio.create_task(client.keep())
                await arrived.get()
        keeping.cancel()

    run(main)


def test_trying_to_connect_ends_at_its_deadline(unix: str) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match=f"no connection to {unix} in 7 s: .*No such file"):
            await made(unix).connect(7)
        assert clock.now() == pytest.approx(7)

    clock.run(main)


def test_a_session_ends_after_its_methods(address: str) -> None:
    async def main() -> None:
        log: list[str] = []
        entered, over = asyncio.Event(), asyncio.Event()

        @asynccontextmanager
        async def session(peer: Connection) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
            async def slow() -> None:
                try:
                    entered.set()
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    log.append("method")

            yield {"slow": slow}
            log.append("session")
            over.set()

        async with serve(address, session, token=TOKEN, clock=Ticks(), errors=()) as at:
            async with connected(at) as peer:
                call = asyncio.create_task(peer.call("slow", timeout=20))
                await entered.wait()
                peer.abort()
                await over.wait()
            with pytest.raises(ConnectionLost):
                await call
        assert log == ["method", "session"]

    run(main)


def test_what_was_told_before_closing_arrives(address: str) -> None:
    async def main() -> None:
        heard: list[bytes] = []
        last = asyncio.Event()
        methods = {"tell": heard.append, "last": last.set}
        async with served(address, methods) as at:
            async with connected(at) as peer:
                for _ in range(20):
                    peer.tell("tell", bytes(1 << 17))
                peer.tell("last")
            await last.wait()
        assert len(heard) == 20

    run(main)


# --- strangers -----------------------------------------------------------------------------------

GARBAGE = "peer does not speak rl_jax; this is rl_jax protocol 1"


@pytest.mark.parametrize(
    ("sent", "refused"),
    [
        (
            frames.pack({"protocol": "rl_jax", "version": 2, "token": TOKEN}),
            "peer speaks protocol 2, this is 1",
        ),
        (frames.hello("guess"), "wrong token"),
        (frames.pack({"protocol": "rl_jax", "version": 1}), "wrong token"),
        (frames.pack(17), GARBAGE),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", GARBAGE),
        (b"\0\0\0\3\xc1\xc1\xc1", GARBAGE),
        (frames.pack("x" * frames.MAX_HELLO), GARBAGE),
    ],
)
def test_a_stranger_gets_one_clear_error_and_nothing_else(
    address: str, sent: bytes, refused: str
) -> None:
    async def main() -> None:
        called: list[int] = []
        async with served(address, {"call": called.append}) as at:
            call = frames.encode(Call(1, 1, "call", [1]))
            (welcome,) = await say(at, sent, call)
            assert welcome == {"protocol": "rl_jax", "version": 1, "refused": refused}
        assert not called

    run(main)


def test_a_client_that_is_refused_says_why_and_tries_no_more(address: str) -> None:
    async def main() -> None:
        async with served(address, {}) as at:
            client = made(at, token="guess")
            with pytest.raises(HandshakeRefused, match=f"^{at}: wrong token$"):
                await client.connect(1e6)
            with pytest.raises(HandshakeRefused):
                await client.keep()

    run(main)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", GARBAGE),
        (
            frames.pack({"protocol": "rl_jax", "version": 3, "refused": ""}),
            "peer speaks protocol 3, this is 1",
        ),
    ],
)
def test_a_server_that_speaks_something_else_is_told_apart(
    unix: str, answer: bytes, said: str
) -> None:
    async def main() -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)

        server = await asyncio.start_unix_server(accept, unix.removeprefix("unix:"))
        with pytest.raises(HandshakeRefused, match=said):
            await made(unix).connect(20)
        server.close()

    run(main)


def test_a_silent_peer_is_shown_the_door(unix: str) -> None:
    async def main() -> None:
        async with served(unix, {}):
            reader, writer = await dial(unix)
            assert await reader.read() == b""
            assert clock.now() == 5
            writer.close()

    clock.run(main)


def test_a_silent_server_is_tried_until_the_deadline(unix: str) -> None:
    async def main() -> None:
        server = await asyncio.start_unix_server(lambda r, w: None, unix.removeprefix("unix:"))
        with pytest.raises(TimeoutError, match=r"no connection to .* in 12 s"):
            await made(unix).connect(12)
        server.close()

    clock.run(main)


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xff\xff\xff",
        frames.pack(["call", 1]),
        frames.pack(["cancel", -1, 0]),
        frames.encode(Call(1, 5, "wait", [])) * 2,
    ],
)
def test_a_peer_that_breaks_the_protocol_later_loses_its_connection(
    address: str, bad: bytes
) -> None:
    async def main() -> None:
        waiting = Waiting()
        methods = {"wait": waiting.wait, "echo": lambda x: x}
        async with served(address, methods) as at, connected(at) as beside:
            reader, writer = await dial(at)
            writer.write(frames.hello(TOKEN) + frames.encode(Call(1, 0, "wait", [])) + bad)
            while await reader.read(1 << 10):
                pass
            writer.close()
            await waiting.cancelled.wait()
            assert await beside.call("echo", 3, timeout=20) == 3

    run(main)


def test_answers_that_nobody_asked_for_are_ignored(address: str) -> None:
    async def main() -> None:
        async with served(address, {"echo": lambda x: x}) as at:
            call = frames.encode(Call(2, 9, "echo", [4]))
            odd = frames.encode(Result(1, 77, None)) + frames.encode(frames.Cancel(1, 78))
            reader, writer = await dial(at)
            writer.write(frames.hello(TOKEN) + odd + call)
            for expected in (b"refused", b"result"):
                size = frames.size(await reader.readexactly(4), 1 << 10)
                assert expected in await reader.readexactly(size)
            writer.close()

    run(main)


def test_a_server_without_a_token_does_not_start(unix: str) -> None:
    async def main() -> None:
        @asynccontextmanager
        async def session(peer: Connection) -> AsyncIterator[Mapping[str, Callable[..., Any]]]:
            yield {}

        with pytest.raises(ValueError, match=f"a server at {unix} needs a token"):
            async with serve(unix, session, token="", clock=Ticks(), errors=()):
                pass

    run(main)
