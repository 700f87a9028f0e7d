"""Where servers listen: what is replaced, what never is, and what is said."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rl_jax.wire import address
from rl_jax.wire.address import Listener, Tcp, Unix


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("unix:/tmp/a:b", Unix("/tmp/a:b")),
        ("tcp:10.0.0.1:80", Tcp("10.0.0.1", 80)),
        ("tcp::0", Tcp("127.0.0.1", 0)),
        ("tcp:0", Tcp("127.0.0.1", 0)),
        ("tcp:[::1]:80", Tcp("::1", 80)),
    ],
)
def test_addresses(text: str, parsed: object) -> None:
    assert address.parse(text) == parsed


@pytest.mark.parametrize("text", ["", "unix:", "tcp:host", "tcp:h:70000", "tcp:h:-1", "/tmp/x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match='neither "unix:PATH" nor "tcp:HOST:PORT"'):
        address.parse(text)


async def listening(where: str) -> Listener:
    listener = Listener(where)
    await listener.start(lambda reader, writer: writer.close())
    return listener


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_address_in_use_is_named_and_left_alone(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        first = await listening(f"unix:{tmp_path}/s" if kind == "unix" else "tcp:127.0.0.1:0")
        with pytest.raises(OSError) as caught:
            Listener(first.address)
        assert str(caught.value) == f"cannot serve at {first.address}: address already in use"
        reader, writer = await address.dial(first.address)
        assert await reader.read() == b"", "it still accepts"
        writer.close()
        first.close()

    asyncio.run(main())


SERVER = """
import asyncio, sys
from rl_jax.wire.address import Listener

async def main():
    await Listener(sys.argv[1]).start(lambda reader, writer: writer.close())
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_file_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, f"unix:{path}"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout and server.stdout.readline() == b"up\n"
        os.kill(server.pid, signal.SIGKILL)
    assert path.is_socket()

    async def main() -> None:
        listener = await listening(f"unix:{path}")
        _, writer = await address.dial(f"unix:{path}")
        writer.close()
        listener.close()

    asyncio.run(main())
    assert not path.exists()


def test_a_server_whose_backlog_is_full_is_a_live_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(OSError, match="address already in use"):
            Listener(f"unix:{path}")
    assert path.is_socket()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(OSError, match=f"cannot serve at unix:{tmp_path}/s: the file there is no"):
        Listener(f"unix:{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "precious"


def test_a_server_that_ends_leaves_its_successors_file(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def main() -> None:
        first = await listening(f"unix:{path}")
        path.unlink()
        second = await listening(f"unix:{path}")
        first.close()
        _, writer = await address.dial(f"unix:{path}")
        writer.close()
        second.close()

    asyncio.run(main())


def test_a_socket_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    async def main() -> None:
        listener = await listening(f"unix:{tmp_path}/s")
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("where", ["unix:/nowhere/at/all", "unix:/" + "x" * 200])
def test_a_path_that_cannot_be_is_named(where: str) -> None:
    with pytest.raises(OSError, match="cannot serve at unix:/"):
        Listener(where)
