"""What keeps a process for an actor of Ray's, without Ray."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from launch.engine import keeper
from launch.engine.keeper import Keeper, environment
from launch.engine.wire import frame, unframed
from rl_jax.replay.log import write_format
from tests.fakes.processes import Watched
from tests.fakes.role import ENV
from tests.structure.source import ROOT, modules_after

ASLEEP = (sys.executable, "-S", "-c", "import signal; signal.pause()")


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


def made(run_dir: Path) -> Keeper:
    write_format(run_dir)
    return Keeper(str(run_dir), str(ROOT), frame({}))


def request(*argv: str, ports: tuple[int, ...] = ()) -> bytes:
    told = {"name": "a", "index": 1, "argv": argv, "env": ENV, "ports": ports, "grace_s": 1.0}
    return frame(told)


def test_a_process_inherits_its_nodes_environment_and_lacks_nothing_of_the_callers() -> None:
    node = {"HOME": "/node", "RAY_AUTH_TOKEN": "t", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1",
            "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace", "CUDA_VISIBLE_DEVICES": "3"}  # fmt: skip
    caller = {"HOME": "/caller", "OMP_NUM_THREADS": "4", "XLA_FLAGS": "--x", "RAY_AUTH_MODE": "t",
              "JAX_PLATFORMS": "cpu", "TPU_VISIBLE_CHIPS": "0"}  # fmt: skip
    assert environment(node, caller) == {
        "HOME": "/node", "CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "4", "XLA_FLAGS": "--x",
    }  # fmt: skip


def test_a_process_lives_until_it_is_told_to_end(tmp_path: Path) -> None:
    async def main() -> None:
        own = made(tmp_path)
        try:
            watched = Watched(unframed(await own.start(request(*ASLEEP)))["pid"])
            assert unframed(await own.wait(0.01)) == {}
            assert unframed(await own.kill(20.0)) == {}
            assert unframed(await own.wait(20.0)) == {"code": -15}
            assert watched.gone(0.0)
            assert (tmp_path / "logs" / "a-1.log").exists()
        finally:
            await own.close()

    asyncio.run(main())


def test_a_process_that_nobody_asks_for_ends_with_its_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = asyncio.Event()

    def leave(code: int) -> None:
        assert code == 1
        left.set()

    async def main() -> None:
        monkeypatch.setattr(keeper, "LEASE_S", 0.5)
        monkeypatch.setattr(os, "_exit", leave)
        own = made(tmp_path)
        watched = Watched(unframed(await own.start(request(*ASLEEP)))["pid"])
        for _ in range(3):  # who asks keeps it alive beyond one lease
            assert unframed(await own.wait(0.3)) == {}
        assert not watched.gone(0.0)
        async with asyncio.timeout(20.0):
            await left.wait()
        assert watched.gone(0.0)

    asyncio.run(main())


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        own = made(tmp_path)
        told = unframed(await own.start(request("/no/such/program")))
        assert told["error"] == "a-1: cannot start /no/such/program (No such file or directory)"
        await own.close()

    asyncio.run(main())


def test_nothing_is_started_where_anybody_may_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")

    async def main() -> None:
        own = made(tmp_path)
        assert unframed(await own.start(request(*ASLEEP))) == {"open": True}
        await own.close()

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["FORMAT"]


def test_nothing_is_started_or_written_where_the_run_is_on_another_disk(tmp_path: Path) -> None:
    async def main() -> None:
        own = Keeper(str(tmp_path / "runs" / "a"), str(ROOT), frame({}))
        assert unframed(await own.start(request(*ASLEEP))) == {"unseen": True}
        await own.close()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_a_keeper_imports_neither_jax_nor_ray() -> None:
    assert not {"jax", "ray"} & modules_after("import launch.engine.keeper")


def test_nothing_is_started_where_a_port_is_taken(tmp_path: Path) -> None:
    """Also by who listens at one of the node's addresses alone."""

    async def main() -> None:
        own = made(tmp_path)
        try:
            with (
                socket.create_server(("127.0.0.1", 0)) as others,
                socket.create_server(("127.0.0.1", 0)) as freed,
            ):
                free, taken = (each.getsockname()[1] for each in (freed, others))
                freed.close()
                told = unframed(await own.start(request(*ASLEEP, ports=(free, taken))))
                assert told == {"taken": taken}
                assert [path.name for path in tmp_path.iterdir()] == ["FORMAT"]
            assert "pid" in unframed(await own.start(request(*ASLEEP, ports=(free, taken))))
        finally:
            await own.close()

    asyncio.run(main())
