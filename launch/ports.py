"""[H] Whether this machine's ports can be had."""

import os
import socket
from collections.abc import Iterable


def first_taken(ports: Iterable[int]) -> tuple[int, str] | None:
    """The first that cannot be listened at, and why; None where all can."""
    for port in ports:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            return port, os.strerror(error.errno or 0)  # its own text repeats the port
    return None
