"""[H] Addresses: "unix:PATH" and "tcp:HOST:PORT"; a TCP host left out is the loopback."""

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
IN_USE = "address already in use"
_BACKLOG = 128
_PROBE_S = 1.0
"""How long a socket file's server may take to accept before it counts as a live one anyway."""

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class Unix(NamedTuple):
    path: str


class Tcp(NamedTuple):
    host: str
    port: int


def parse(address: str) -> Unix | Tcp:
    """A ValueError names both forms."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        return Unix(rest)
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return Tcp(host.strip("[]") or LOOPBACK, int(port))
    raise ValueError(f'address {address!r} is neither "unix:PATH" nor "tcp:HOST:PORT"')


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream to the server at `address`; an OSError where there is none."""
    match parse(address):
        case Unix(path):
            return await asyncio.open_unix_connection(path)
        case Tcp(host, port):
            return await asyncio.open_connection(host, port)


class Listener:
    """A listening socket; `address` is where it really is, also where port 0 was asked for."""

    def __init__(self, address: str) -> None:
        """An OSError names an address in use. The file of a server that died is replaced, that of
        a live one never."""
        self._parsed = parse(address)
        try:
            match self._parsed:
                case Unix(path):
                    self._socket, self.address = _bind_unix(path), address
                    self._file = os.stat(path)
                case Tcp(host, port):
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    self._socket = socket.create_server((host, port), family=family)
                    port = self._socket.getsockname()[1]
                    self.address = f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"
        except OSError as error:
            why = IN_USE if error.errno == errno.EADDRINUSE else error.strerror or error
            raise OSError(f"cannot serve at {address}: {why}") from error

    async def start(self, accept: Accept) -> None:
        if isinstance(self._parsed, Unix):
            self._server = await asyncio.start_unix_server(accept, sock=self._socket)
        else:
            self._server = await asyncio.start_server(accept, sock=self._socket)

    def close(self) -> None:
        self._server.close()
        if isinstance(self._parsed, Unix) and _same_file(self._parsed.path, self._file):
            os.unlink(self._parsed.path)


def _bind_unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        made.bind(path)
        os.chmod(path, 0o600)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _remove_stale(path: str) -> None:
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("the file there is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except (TimeoutError, BlockingIOError):
            # Its backlog is full: slow, but alive.
            pass
    raise OSError(IN_USE)


def _same_file(path: str, was: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), was)
    except FileNotFoundError:
        return False
