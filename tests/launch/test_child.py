"""[H] The inside of a process: what it answers to anybody, and that it dies with its parent."""

import asyncio
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.engine.base import CONTROL_FD, CallFailed
from launch.engine.child import die_with_parent, serve_control
from launch.engine.local import LocalEngine, LocalGroup
from launch.engine.wire import MAX_MESSAGE, exchange, frame
from tests.fakes.processes import Pipe, Watched
from tests.fakes.role import ENV, group, script

LONG = 60.0
TOKEN = "stands for a token of 32 letters"
"""Replaced by the real one, which is as long: the message stays well formed."""


async def with_child(tmp_path: Path, body: Any) -> None:
    """`body(group, socket, token)` with one serving process."""
    engine = LocalEngine(tmp_path)
    try:
        async with asyncio.timeout(LONG):
            started = await engine.start_group(group("a"))
            socket, token = await started.call("control", {}, deadline=LONG)
            await body(started, Path(socket), token)
    finally:
        await engine.close()


GARBAGE = {
    "four gigabytes": (struct.pack("<I", 2**32 - 1), "a control message of 4294967295 bytes"),
    "one byte too many": (struct.pack("<I", MAX_MESSAGE + 1), f"at most {MAX_MESSAGE}"),
    "no msgpack": (struct.pack("<I", 1) + b"\xc1", ""),
    "cut msgpack": (struct.pack("<I", 2) + b"\x92\x01", ""),
    "http": (b"GET / HTTP/1.1\r\n\r\n", "a control message of 542393671 bytes"),
    "no map": (struct.pack("<I", 1) + b"\x90", "a control message is a map, not list"),
    "no token": (frame({"function": "echo", "arguments": {}, "deadline": 1}), "wrong token"),
    "token of another kind": (frame({"token": 1}), "wrong token"),
    "token alone": (frame({"token": TOKEN}), "a call is {token, function, arguments, deadline}"),
    "arguments in a list": (
        frame({"token": TOKEN, "function": "echo", "arguments": [1], "deadline": 1}),
        "a call is {token, function, arguments, deadline}",
    ),
}


def test_garbage_is_answered_and_the_next_call_works(tmp_path: Path) -> None:
    async def body(started: LocalGroup, socket: Path, token: str) -> None:
        assert len(token) == len(TOKEN)
        for name, (request, error) in GARBAGE.items():
            answer = await exchange(socket, request.replace(TOKEN.encode(), token.encode()))
            assert set(answer) == {"error"} and error in answer["error"], name
            assert await started.call("echo", {"value": 1}, deadline=LONG) == 1, name

    asyncio.run(with_child(tmp_path, body))


def test_a_message_cut_short_harms_nobody(tmp_path: Path) -> None:
    async def body(started: LocalGroup, socket: Path, token: str) -> None:
        for part in (b"", b"\x01", frame({"token": token, "function": "echo"})[:-1]):
            reader, writer = await asyncio.open_unix_connection(socket)
            writer.write(part)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert await started.call("echo", {"value": 1}, deadline=LONG) == 1

    asyncio.run(with_child(tmp_path, body))


def test_only_its_user_reaches_the_socket(tmp_path: Path) -> None:
    async def body(started: LocalGroup, socket: Path, token: str) -> None:
        assert len(os.fsencode(socket)) < 108
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        folders.append(socket.parent)

    folders: list[Path] = []
    asyncio.run(with_child(tmp_path, body))
    assert not folders[0].exists()


ANSWERS = """
import os, socket, sys
listener = socket.socket(fileno=int(os.environ["RL_JAX_CONTROL_FD"]))
for answer in sys.argv[1:]:
    connection, _ = listener.accept()
    connection.recv(1 << 20)
    connection.sendall(bytes.fromhex(answer))
    connection.close()
listener.accept()
"""


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (struct.pack("<I", 2**31), r"the answer to x\(\): a control message of 2147483648 bytes"),
        (struct.pack("<I", 1) + b"\xc1", r"the answer to x\(\): "),
        (struct.pack("<I", 1) + b"\x80", r"x\(\): an empty answer"),
    ],
)
def test_an_answer_that_is_none(tmp_path: Path, answer: bytes, text: str) -> None:
    async def main() -> None:
        engine = LocalEngine(tmp_path)
        try:
            started = await engine.start_group(group("a", script(ANSWERS, answer.hex())))
            with pytest.raises(CallFailed, match=f"a: {text}"):
                await started.call("x", {}, deadline=LONG)
        finally:
            await engine.close()

    asyncio.run(main())


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    """Not one that ignores TERM, holds the GIL, is a grandchild, or looks only afterwards."""
    pipe = Pipe(tmp_path / "pipe")
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.launcher", "engine", str(tmp_path), pipe.path],
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        at_once = [Watched(pid) for pid in pids["at once"]]
        late = Watched(pids["late"])
    finally:
        parent.kill()
        parent.communicate()
    shutil.rmtree(Path(pids["socket"]).parent)  # what a killed engine leaves behind
    assert len(at_once) == 6
    survivors = [each.pid for each in at_once if not each.gone()]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert survivors == []
    assert not late.gone(0.0)
    pipe.tell()
    assert late.gone()


def test_only_an_engine_starts_such_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTROL_FD, raising=False)
    text = f"{CONTROL_FD} is not set: this program is started by an engine"
    with pytest.raises(RuntimeError, match=text):
        die_with_parent()
    with pytest.raises(RuntimeError, match=text):
        asyncio.run(serve_control({}))
