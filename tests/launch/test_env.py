"""[H] XLA flags: what the user set wins, and the installed XLA knows them all."""

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from launch import env
from launch.env import fingerprint, fingerprint_digest, xla_flags
from rl_jax.config.base import UserError

COUNT = "--xla_force_host_platform_device_count"
TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def test_flags():
    assert xla_flags({}, 3) == f"{COUNT}=3 {TIMEOUT}=20"
    assert xla_flags({}, 64) == f"{COUNT}=8 {TIMEOUT}=20"
    assert xla_flags({"XLA_FLAGS": f"{COUNT}=2 --x=1"}, 3) == f"{COUNT}=2 --x=1 {TIMEOUT}=20"
    assert xla_flags({"XLA_FLAGS": f"{TIMEOUT}=5"}, 1) == f"{TIMEOUT}=5 {COUNT}=1"


def test_xla_takes_them():
    code = (
        "from launch import env; env.prepare(3); import os; before = os.environ['XLA_FLAGS'];"
        "print(env.available_devices()); env.prepare(5); assert os.environ['XLA_FLAGS'] == before"
    )
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


def test_the_fingerprint_hangs_on_flags_and_nothing_that_varies(monkeypatch):
    first = fingerprint()
    assert first == fingerprint()
    assert first.startswith("jaxlib ") and " x8 " in first
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    flags = fingerprint()
    assert flags != first and flags.rsplit(" ", 1)[0] == first.rsplit(" ", 1)[0]
    monkeypatch.undo()
    monkeypatch.setattr(os, "cpu_count", lambda: 4096)
    assert fingerprint() not in (first, flags)
    assert fingerprint_digest("abc") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_devices_behind_a_proxy_are_made_known(monkeypatch):
    """A stand-in for the package: it is in images for Pathways alone."""
    told = []
    made = ModuleType("pathwaysutils")
    made.__spec__ = ModuleSpec("pathwaysutils", None)
    made.initialize = lambda: told.append("initialized")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    env.prepare(1)
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    with pytest.raises(UserError, match="needs the package pathwaysutils"):
        env.prepare(1)
    monkeypatch.setitem(sys.modules, "pathwaysutils", made)
    env.prepare(1)
    assert told == ["initialized"]
