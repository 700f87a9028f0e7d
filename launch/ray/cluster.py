"""[H] A connection to a Ray cluster, refused where anybody who reaches it may run code on it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from launch.site import read_secret
from rl_jax.config.base import UserError

MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

REACH_S = 10.0


def prepare() -> None:
    """Before jax and Ray are imported, which read their variables then. UserError, in one line,
    where there is no Ray, or no token that others cannot read."""
    # This machine's devices are the roles'.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Roles are started by the interpreter of this process, not by what started it.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    if find_spec("ray") is None:
        raise UserError("--target ray: Ray is not installed (`make setup-cluster`)")
    if (mode := os.environ.get(MODE)) != "token":
        raise UserError(
            f"{MODE} = {mode or 'not set'}: needs token, here and on every node, or whoever "
            "reaches a port of the cluster runs code on it"
        )
    if os.environ.get(TOKEN):
        return
    file = os.environ.get(TOKEN_FILE)
    if not file:
        raise UserError(f"{TOKEN_FILE} is not set: it names a file of mode 600 with the token")
    read_secret(TOKEN_FILE, file)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process is a driver of the cluster at `address`. UserError where it cannot be."""
    _check_reachable(address)
    from launch.engine.ray import RayError, ray

    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split("\n")[0].split())
        raise UserError(f"--address {address}: no Ray cluster to connect to: {why}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--address {address}: nobody answers there ({why})") from None
