"""A run that starts from a snapshot: what is wrong with it is one line and status 2."""

import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from launch import build
from launch.cli import main
from rl_jax.config.load import load
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.store import SnapshotStore

CONFIG = """
name = "small"
[model]
width = 32
layers = ["mla"]
heads = 2
head_dim = 8
ffn = 32
kv_latent = 8
kv_shared_key = 8
"""


@pytest.fixture(autouse=True)
def nothing_compiled(compiled_once: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mistake is found while programs compile, which would go on beside later tests."""
    ended = threading.Event()
    for name in ("compile_step", "compile_audit", "compile_sampler"):
        monkeypatch.setattr(build, name, lambda *args: ended.wait(60.0))
    yield
    ended.set()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def snapshot(config: Path, tmp_path: Path) -> Path:
    """A committed version 0 of zeros for the model of CONFIG with the lookup task's vocabulary."""
    own = load(config, [])
    model, mesh = build.build_policy(own, 384), build.build_meshes(own).trainer
    abstract = build.abstract_params(model, mesh)
    params = jax.tree.map(lambda leaf: jax.device_put(jax.numpy.zeros(leaf.shape)), abstract)
    store = SnapshotStore(tmp_path / "snapshots")
    manifest = build_manifest(params, 0, 0, "")
    store.write(manifest, params)
    store.commit(manifest)
    return tmp_path / "snapshots" / "0"


def refused(config: Path, start: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    out = config.parent / "run"
    override = f'warm_start.snapshot="{start}"'
    assert main(["run", str(config), "--out", str(out), "--set", override, *more]) == 2
    assert not out.exists()
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_corrupt_snapshot_is_named(config, snapshot, capsys):
    largest = max((p for p in (snapshot / "weights").rglob("*") if p.is_file()), key=_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    line = refused(config, snapshot, capsys)
    assert line.startswith("rl-jax: warm_start.snapshot: ") and "corrupt" in line
    assert str(snapshot) in line


def test_a_missing_snapshot_is_named(config, snapshot, capsys):
    line = refused(config, snapshot.parent / "7", capsys)
    assert f"{snapshot.parent / '7'}: no such snapshot; there are [0]" in line


def test_another_models_snapshot_is_refused(config, snapshot, capsys):
    line = refused(config, snapshot, capsys, "--set", "model.ffn=64")
    assert "has shape" in line and "expected" in line


def test_not_a_version(config, snapshot, capsys):
    assert "needs a version's directory" in refused(config, snapshot.parent, capsys)


def _size(path: Path) -> int:
    return path.stat().st_size
