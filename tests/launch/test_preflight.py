"""Every check of a launch's machines, each with its fault put in."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import preflight
from launch.cli import main
from launch.preflight import Facts
from launch.spec import RunSpec, make_plan
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig

CONFIG = 'name = "x"\n[launch]\nfirst_port = 6700\n'


def fault(check: Callable[[], object]) -> str:
    with pytest.raises(UserError) as told:
        check()
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_machine_that_is_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "SHM_BYTES", 1)
    Path("x.toml").write_text(CONFIG)
    assert main(["preflight", "x.toml", "--no-devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.partition(":")[0] for line in lines]
    assert heads == ["ports", "shared memory", "store", "versions"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.toml"], "nothing is left"


def test_a_port_in_use() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        said = fault(lambda: preflight.check_ports([port]))
    assert said.startswith(f"ports: {port} cannot be had (Address already in use)")
    assert preflight.check_ports([port]) == f"ports: {port} free"


def test_too_little_shared_memory(tmp_path: Path) -> None:
    said = fault(lambda: preflight.check_memory(tmp_path, 1 << 60))
    assert "MiB free, needs 1099511627776: give the container more" in said
    assert preflight.check_memory(tmp_path, 1).endswith(f"MiB free in {tmp_path}")


def test_a_store_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "can be written, read and cleared" in preflight.check_store(tmp_path / "new", 0)
    assert not list(tmp_path.iterdir())

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    said = fault(lambda: preflight.check_store(tmp_path, 0))
    assert said == f"store: {tmp_path}: {os.strerror(28)}: snapshots cannot be kept there"
    assert not list(tmp_path.iterdir())


def test_a_store_that_returns_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"")
    said = fault(lambda: preflight.check_store(tmp_path, 0))
    assert said.endswith("what was read is not what was written")


def test_unequal_versions() -> None:
    own = {"python": "3.12.1", "jax": "0.11.2"}
    known = [Facts(0, own), Facts(1, own), Facts(2, own | {"jax": "0.11.1"})]
    said = fault(lambda: preflight.check_versions(known))
    assert said.startswith("versions: host 2 has jax 0.11.1, host 0 0.11.2")
    assert preflight.check_versions(known[:2]) == "versions: python 3.12.1, jax 0.11.2"


def test_skew_is_what_the_disk_does_not_explain() -> None:
    assert preflight.skew(10.0, 12.0, 15.0) == 0.0
    assert preflight.skew(10.0, 22.0, 15.0) == 7.0
    assert preflight.skew(10.0, 4.0, 15.0) == 6.0
    said = fault(lambda: preflight.check_clocks({1: 0.1, 2: 7.0}))
    assert said.startswith("clocks: host 2 is off host 0 by 7 s: at most 5 s")


def met(where: Path, count: int) -> dict[int, str]:
    """What each of `count` hosts is told; they meet as threads."""
    told: dict[int, str] = {}

    def one(host: int) -> None:
        try:
            told[host] = preflight.meet(where, host, count)
        except UserError as error:
            told[host] = f"fault: {error}"

    threads = [threading.Thread(target=one, args=(host,)) for host in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_hosts_meet(tmp_path: Path) -> None:
    told = met(tmp_path / "meet", 3)
    assert len(set(told.values())) == 1 and "equal on 3 hosts that share" in told[2]


@pytest.mark.parametrize("late", [0, 1])
def test_what_an_earlier_meeting_left_is_not_believed(tmp_path: Path, late: int) -> None:
    """Whoever comes first, host 1 is told today's verdict, and host 0 hears today's answer."""
    where = tmp_path / "meet"
    where.mkdir()
    old = {"ask": "old", "answer-old-1": {"versions": {"jax": "0.1"}, "clock": 0.0},
           "verdict-old": {"line": "all was well", "fault": ""}}  # fmt: skip
    for name, value in old.items():
        (where / name).write_text(json.dumps(value))
    told: dict[int, str] = {}

    def one(host: int) -> None:
        told[host] = preflight.meet(where, host, 2)

    first, second = (threading.Thread(target=one, args=(host,)) for host in (1 - late, late))
    first.start()
    first.join(0.3)
    assert not told, "alone, nobody is told anything"
    second.start()
    first.join()
    second.join()
    assert told[0] == told[1] and "equal on 2 hosts" in told[1]


def test_a_fault_is_told_on_every_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = preflight.facts(0).versions
    odd = {0: own, 1: dict(own) | {"jax": "0.1"}}
    monkeypatch.setattr(preflight, "facts", lambda host: Facts(host, odd[host]))
    told = met(tmp_path / "meet", 2)
    assert len(set(told.values())) == 1 and "host 1 has jax 0.1" in told[0]


def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = preflight._write

    def late(path: Path, value: object) -> None:
        if path.name.startswith("answer-") and isinstance(value, dict):
            value = value | {"clock": time.time() + 60}
        write(path, value)

    monkeypatch.setattr(preflight, "_write", late)
    told = met(tmp_path / "meet", 2)
    assert told[0].startswith("fault: clocks: host 1 is off host 0 by 60 s") and told[1] == told[0]


def test_a_disk_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MEET_S", 0.1)
    said = fault(lambda: preflight.meet(tmp_path / "a", 1, 2))
    assert "shared disk: ask is not in" in said and "does host 1 see the same disk" in said
    said = fault(lambda: preflight.meet(tmp_path / "b", 0, 2))
    assert "-1 is not in" in said and "does host 1 see the same disk" in said


def test_devices() -> None:
    right = {"devices": 8, "sum": 8.0}
    assert preflight.judge_devices("gpu", 8, right).startswith("devices: 8 gpu")
    assert fault(lambda: preflight.judge_devices("gpu", 4, right)) == (
        "devices: 8 gpu, launch says 4 a host"
    )
    wrong = right | {"sum": 7.0}
    assert fault(lambda: preflight.judge_devices("gpu", 8, wrong)) == (
        "psum: ones over 8 gpu devices sum to 7"
    )


def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"name": "x", "launch": {"trainer": {"count": 1, "devices": 2}}}
    plan = make_plan(RunSpec(RunConfig.model_validate(config), "run"))
    assert preflight.check_devices(plan, 0) == "devices: 2 cpu, a sum over them is right"
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    monkeypatch.setattr(preflight, "PROBE_S", 0.01)
    assert fault(lambda: preflight.check_devices(plan, 0)).startswith("devices: no answer within")


def test_a_host_that_the_plan_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(CONFIG)
    assert main(["preflight", "x.toml", "--host", "1"]) == 2
    assert "--host 1: the plan has 1 hosts" in capsys.readouterr().err
    Path("plan.json").write_text(json.dumps({"name": "x"}))
    assert main(["preflight", "x.toml", "--plan", "plan.json"]) == 2
    assert "no plan of a launch (not what `rl-jax render` writes)" in capsys.readouterr().err
