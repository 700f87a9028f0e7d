"""The table of the environment: compilers take its flags, and the user's values win."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.env_table import FLAG_VARIABLES, over, resolve, rows, variables
from tests.structure.source import ROOT

AOT = ROOT / ".tools" / "aot" / "bin" / "python"
CLIENT = "from jaxlib import xla_client; print(len(xla_client.make_cpu_client().devices()))"
TOPOLOGY = (
    "from jax.experimental import topologies as t;"
    "print(len(t.get_topology_desc(platform='tpu', topology_name='v6e:2x2').devices))"
)


def started(python: Path, code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A fresh process with nothing of ours in its environment but `env`."""
    clean = {k: v for k, v in os.environ.items() if k not in FLAG_VARIABLES}
    return subprocess.run(
        [str(python), "-c", code],
        env=clean | env | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_client_of_xla_takes_the_flags(platform, kind) -> None:
    env = variables(platform, resolve(platform, kind))
    done = started(Path(sys.executable), CLIENT, env)
    assert done.returncode == 0, done.stderr[-300:]


def test_a_flag_that_xla_does_not_know_is_found() -> None:
    env = variables("gpu", resolve("gpu", "trainer", ["XLA_FLAGS=--xla_gpu_graph_level=1"]))
    done = started(Path(sys.executable), CLIENT, env)
    assert done.returncode != 0 and "xla_gpu_graph_level" in done.stderr


aot = pytest.mark.skipif(not AOT.exists(), reason="libtpu comes with `make test-aot`")


@aot
@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_libtpu_takes_the_flags(kind) -> None:
    env = variables("tpu", resolve("tpu", kind))
    done = started(AOT, TOPOLOGY, env | {"TPU_SKIP_MDS_QUERY": "1", **_SEVERAL})
    assert done.stdout == "4\n", done.stderr[-300:]


@aot
def test_a_flag_that_libtpu_does_not_know_is_found() -> None:
    env = {"LIBTPU_INIT_ARGS": "--xla_tpu_graph_level=1", "TPU_SKIP_MDS_QUERY": "1", **_SEVERAL}
    done = started(AOT, TOPOLOGY, env)
    assert done.returncode != 0 and "xla_tpu_graph_level" in done.stderr


_SEVERAL = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@pytest.mark.parametrize("kind", ["trainer", "sampler", "host"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_rows_have_reasons_and_a_name_once(platform, kind) -> None:
    found = rows(platform, kind)
    assert all(row.reason and row.source for row in found)
    names = [row.name for row in found]
    assert len(set(names)) == len(names)
    env = variables(platform, resolve(platform, kind))
    assert "LIBTPU_INIT_ARGS" not in env or platform == "tpu"
    assert "--xla_tpu" not in env.get("XLA_FLAGS", "")
    if kind == "host":
        assert env["JAX_PLATFORMS"] == "cpu" and not FLAG_VARIABLES & env.keys()


def test_the_users_values_win_over_the_table() -> None:
    users = ["NCCL_DEBUG=INFO", "XLA_FLAGS=--xla_gpu_enable_pipelined_all_gather=false --xla_x=1"]
    env = variables("gpu", resolve("gpu", "trainer", users))
    assert env["NCCL_DEBUG"] == "INFO"
    flags = env["XLA_FLAGS"].split()
    assert "--xla_gpu_enable_pipelined_all_gather=false" in flags and "--xla_x=1" in flags
    assert "--xla_gpu_enable_pipelined_all_gather=true" not in flags
    assert "--xla_gpu_enable_pipelined_all_reduce=true" in flags


def test_what_a_process_finds_wins_but_for_its_place() -> None:
    planned = {"XLA_FLAGS": "--a=1 --b=2", "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "4,5"}
    found = {"XLA_FLAGS": "--b=3 --c", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "X": "1"}
    assert over(planned, found) == {
        "XLA_FLAGS": "--b=3 --c --a=1",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "4,5",
    }
    assert over(planned, {}) == planned
