"""Settings of the whole test session, made before jax is imported, and the table of test times.

Eight virtual CPU devices; shapes and dtypes of our annotated functions checked by jaxtyping and
beartype; warnings raised from our packages are errors (pyproject.toml).
"""

import gc
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from tests import typechecker

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # A collective that waits for a device which never comes aborts instead of hanging.
        "--xla_cpu_collective_call_terminate_timeout_seconds=20",
    )
)
CACHE = "JAX_COMPILATION_CACHE_DIR"
COMPILED = None if CACHE in os.environ else tempfile.TemporaryDirectory(prefix="compiled-")
"""Programs that one session's processes share: pytest's workers and the children of tests compile
many of the same, and what is read back is the same machine code. A user's own directory outlives
the session."""
if COMPILED is not None:
    os.environ[CACHE] = COMPILED.name
# By default jax keeps what took a second. Reading takes a few milliseconds.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
jaxtyping.install_import_hook(["rl_jax", "models", "launch"], f"{typechecker.__name__}.check")

TESTS = Path(__file__).parent
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000
BUDGET_MINUTES = {
    "loop": 3.0,
    "losses": 1.5,
    "notebooks": 2.5,
    "kernels": 2.0,
    "models": 2.0,
    "sampler": 2.0,
    "rollouts": 2.0,
    "replay and drills": 2.0,
    "rest": 0.5,
}
PART_OF = {
    "trainer": "loop",
    "integration": "loop",
    "launch": "loop",
    "losses": "losses",
    "advantages": "losses",
    "notebooks": "notebooks",
    "kernels": "kernels",
    "models": "models",
    "sampler": "sampler",
    "orchestrator": "rollouts",
    "gateway": "rollouts",
    "tasks": "rollouts",
    "sandboxes": "rollouts",
    "queues": "rollouts",
    "wire": "rollouts",
    "replay": "replay and drills",
    "drills": "replay and drills",
    "snapshots": "replay and drills",
}
"""Folder of tests/ -> the budget that pays for it; any other folder is `rest`."""


@pytest.fixture
def strict_numerics() -> Iterator[None]:
    """No implicit dtype or rank promotion. For tests of our own functions: optax fails under it."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="module")
def mapped_memory() -> Iterator[None]:
    """Lets go of compiled programs before there are too many.

    Each takes some 16 mappings; a process has at most 65,530 (vm.max_map_count), and XLA aborts.
    """
    yield
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


class TimeTable:
    """Adds up the seconds of each folder of tests/ and prints its share of the wall's time, which
    is that over the number of processes, against the budgets."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.started = time.monotonic()
        self.collecting = 0.0
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_collection_finish(self) -> None:
        self.collecting = time.monotonic() - self.started
        # Tracing makes many objects; to look each time at all that was imported is a fifth of it.
        gc.freeze()
        gc.set_threshold(10_000)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = (TESTS.parent / report.location[0]).resolve()
        inside = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
        self.seconds[inside[0] if len(inside) > 1 else "(top)"] += report.duration / self.processes

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.seconds:
            return
        parts: dict[str, dict[str, float]] = {part: {} for part in BUDGET_MINUTES}
        for folder, seconds in sorted(self.seconds.items()):
            parts[PART_OF.get(folder, "rest")][folder] = seconds
        terminalreporter.section("time by folder of tests/, against its budget", sep="-")
        for part, folders in parts.items():
            if not folders:
                continue
            budget = 60 * BUDGET_MINUTES[part]
            used = sum(folders.values())
            over = "  OVER" if used > budget else ""
            inside = ", ".join(f"{name} {seconds:.1f}" for name, seconds in folders.items())
            terminalreporter.line(f"{part:18}{used:7.1f} s of {budget:4.0f}{over}   {inside}")
        terminalreporter.line(f"{'collecting':18}{self.collecting:7.1f} s")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore it, and so would every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes = len(config.getoption("tx", None) or ()) or 1
    config.pluginmanager.register(TimeTable(processes), "time-table")
