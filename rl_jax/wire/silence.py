"""[H] TCP connections whose peer vanished: its machine or the network, so that no end ever comes.

Only the kernel can tell a peer that is busy from one that is gone: it answers for a process that
computes.
"""

import asyncio
import socket
from contextlib import suppress

IDLE_S = 30
"""Where nothing is under way, a peer whose kernel says nothing for so long is lost."""
SILENT_S = 75
"""Where data are under way, likewise; so is then who reads nothing for so long. An outage of up to
about 50 s does no harm: what is not confirmed is sent again ever more rarely."""
_FIRST_S, _EVERY_S = 10, 5


def end_when_idle(writer: asyncio.StreamWriter) -> None:
    """Reads fail with an OSError once the peer was silent for IDLE_S; a peer that reads nothing is
    waited for, as is one that vanished with data under way, which the kernel sends again for a
    quarter of an hour. Sockets of the machine itself, and closed ones, stay as they are."""
    _set(writer, IDLE_S, {})


def end_when_silent(writer: asyncio.StreamWriter) -> None:
    """Reads and writes fail with an OSError once the peer was silent for SILENT_S, idle or not.
    Sockets of the machine itself, and closed ones, stay as they are."""
    # Linux alone has it; it overrides the number of probes of an idle connection.
    _set(writer, SILENT_S, {"TCP_USER_TIMEOUT": SILENT_S * 1000})


def _set(writer: asyncio.StreamWriter, silent_s: int, more: dict[str, int]) -> None:
    own = writer.get_extra_info("socket")
    if own.family not in (socket.AF_INET, socket.AF_INET6):
        return
    probes = (silent_s - _FIRST_S) // _EVERY_S
    options = {"TCP_KEEPIDLE": _FIRST_S, "TCP_KEEPINTVL": _EVERY_S, "TCP_KEEPCNT": probes} | more
    # On one that was closed meanwhile: whoever reads or writes finds its end.
    with suppress(OSError):
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
