"""[H] Environment that jax reads once, when it is imported; the user's own settings win."""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rl_jax.config.base import UserError

VIRTUAL_DEVICES = 8
"""The most devices that one CPU is split into without being asked."""
_COUNT = "--xla_force_host_platform_device_count"
_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def xla_flags(environ: Mapping[str, str], devices: int) -> str:
    """XLA_FLAGS for a run on `devices`: the user's, and what they leave open.

    The count splits the CPU and means nothing to an accelerator. The timeout ends a process whose
    collective waits for a partner that never comes.
    """
    given = environ.get("XLA_FLAGS", "")
    ours = {_COUNT: min(devices, VIRTUAL_DEVICES), _TIMEOUT: 20}
    missing = [f"{flag}={value}" for flag, value in ours.items() if flag not in given]
    return " ".join([*given.split(), *missing])


def prepare(devices: int) -> None:
    """Sets XLA_FLAGS; without effect, and therefore not done, once jax is imported.

    Where devices are behind a proxy (Pathways), jax is told of it; UserError where what does that
    is not installed.
    """
    if "jax" not in sys.modules:
        os.environ["XLA_FLAGS"] = xla_flags(os.environ, devices)
    if "proxy" in os.environ.get("JAX_PLATFORMS", "").split(","):
        if find_spec("pathwaysutils") is None:
            raise UserError("JAX_PLATFORMS = proxy: needs the package pathwaysutils in the image")
        import_module("pathwaysutils").initialize()


def available_devices() -> int:
    """Devices of the default backend; imports jax and starts the backend."""
    import jax

    return jax.device_count()


def fingerprint() -> str:
    """What the numerics of a run depend on besides its configuration, in a few words.

    Equal fingerprints: equal bits. The end is a digest of flags, threads and the CPU's features.
    """
    import jax

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    features = {line for line in lines if line.startswith(("flags", "Features"))}
    rest = [os.environ.get("XLA_FLAGS", ""), str(os.cpu_count()), platform.machine()]
    digest = hashlib.sha256("\n".join([*rest, *sorted(features)]).encode()).hexdigest()[:12]
    device = jax.devices()[0].device_kind
    return f"jaxlib {version('jaxlib')} {device} x{jax.device_count()} {digest}"


def fingerprint_digest(text: str) -> str:
    """As the journal has it: sha256 in hex."""
    return hashlib.sha256(text.encode()).hexdigest()
