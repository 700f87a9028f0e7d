"""[H] XLA flags: what the user set wins, and the installed XLA knows them all."""

import os
import subprocess
import sys

from launch.env import xla_flags

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
