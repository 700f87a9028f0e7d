"""The store: what a reader sees at every point of a write, and after every kind of damage."""

import errno
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.arrays import Tree
from rl_jax.snapshots import store as module
from rl_jax.snapshots.leaves import JOURNAL, GrowingSnapshot
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.policies import keep_last
from rl_jax.snapshots.store import SnapshotStore

ROOT = Path(__file__).parents[2]


def params(scale: float = 1.0) -> Tree:
    w = jnp.arange(32, dtype=jnp.float32).reshape(4, 8) * scale
    return {"blocks": [{"w": w}, {"w": -w}], "norm": jnp.ones(8, jnp.bfloat16) * scale}


def abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same(a: Tree, b: Tree) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


def publish(store: SnapshotStore, version: int, tree: Tree) -> None:
    manifest = build_manifest(tree, version, 10 * version, "")
    store.write(manifest, tree)
    store.commit(manifest)
    store.point(version)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with version 3, to be copied before it is damaged."""
    root = tmp_path_factory.mktemp("written") / "snapshots"
    publish(SnapshotStore(root), 3, params())
    return root


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(Path(shutil.copytree(written, tmp_path / "copy")))


def test_round_trip(store: SnapshotStore) -> None:
    publish(store, 0, params())
    publish(store, 2, params(2.0))
    assert store.versions() == (0, 2) and store.latest() == 2
    assert same(store.load(0, abstract(params())), params())
    assert same(store.load(2, abstract(params())), params(2.0))
    assert store.manifest(2).step == 20


def test_an_empty_store_has_no_versions(store: SnapshotStore) -> None:
    assert store.versions() == () and store.latest() is None


def test_loading_into_another_mesh_and_dtype(damaged: SnapshotStore) -> None:
    mesh = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("data", "tensor"))
    spread = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def target(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = spread if x.ndim == 2 else whole
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding)

    loaded = damaged.load(3, jax.tree.map(target, params()))
    assert loaded["blocks"][1]["w"].sharding == spread
    assert loaded["norm"].sharding == whole
    assert same(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params()))


def test_arrays_may_stand_for_their_own_shape(damaged: SnapshotStore) -> None:
    assert same(damaged.load(3, jax.tree.map(jnp.zeros_like, params())), params())


# --- order of writing ----------------------------------------------------------------------------


def test_nothing_is_seen_before_the_marker_and_latest_before_the_pointer(
    store: SnapshotStore,
) -> None:
    publish(store, 0, params())
    manifest = build_manifest(params(2.0), 1, 4, "")
    store.write(manifest, params(2.0))
    assert store.versions() == (0,) and store.latest() == 0
    with pytest.raises(ValueError, match=r"1/COMMITTED is missing: .* never committed"):
        store.load(1, abstract(params()))
    with pytest.raises(ValueError, match="never committed"):
        store.point(1)
    store.commit(manifest)
    assert store.versions() == (0, 1) and store.latest() == 0
    store.point(1)
    assert store.latest() == 1


def test_an_uncommitted_version_is_written_anew(store: SnapshotStore) -> None:
    store.write(build_manifest(params(7.0), 1, 4, ""), params(7.0))
    publish(store, 1, params(2.0))
    assert same(store.load(1, abstract(params())), params(2.0))


def test_a_committed_version_is_never_replaced(store: SnapshotStore) -> None:
    publish(store, 1, params())
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("*")}
    publish(store, 1, params())  # a trainer that came back to the same weights
    assert {p: p.stat().st_mtime_ns for p in store.root.rglob("*")} == before
    with pytest.raises(ValueError, match="1 exists with other weights"):
        publish(store, 1, params(2.0))
    assert same(store.load(1, abstract(params())), params())


def test_a_full_disk_is_told_in_one_line(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written where it can be foreseen, and as an OSError where it cannot."""
    nearly = shutil.disk_usage("/")._replace(free=100)
    with monkeypatch.context() as full:
        full.setattr(module.shutil, "disk_usage", lambda path: nearly)
        with pytest.raises(OSError, match=r"0 needs \S+ MB of disk, 0\.0 MB are free") as caught:
            publish(store, 0, params())
    assert caught.value.errno == errno.ENOSPC

    def refused(*args: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing\nmany lines")

    with monkeypatch.context() as full:
        full.setattr(module.ocp, "save", refused)
        with pytest.raises(OSError, match="cannot be written") as caught:
            publish(store, 0, params())
    assert caught.value.errno == errno.ENOSPC and "\n" not in str(caught.value)
    assert store.versions() == ()
    publish(store, 0, params())
    assert store.versions() == (0,)


@pytest.mark.parametrize(
    "code", [("RESOURCE_EXHAUSTED", errno.ENOSPC), ("PERMISSION_DENIED", errno.EACCES)]
)
@pytest.mark.parametrize("function", ["save", "finalize"])
def test_a_disk_that_fills_is_told_by_a_growing_snapshot(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, function: str, code: tuple[str, int]
) -> None:
    def refused(*args: object) -> None:
        raise ValueError(f"{code[0]}: Error writing\nmany lines")

    growing = GrowingSnapshot(store, 0)
    growing.open()
    with monkeypatch.context() as full:
        full.setattr(module.ocp.partial, function, refused)
        with pytest.raises(OSError, match="cannot be written") as caught:
            growing.add({"a": np.ones(3, np.float32)})
            growing.finish()
    assert caught.value.errno == code[1] and "\n" not in str(caught.value)


def test_a_journal_that_was_cut_twice_is_read(store: SnapshotStore) -> None:
    """Parts of two processes, of which each was cut while it wrote its line."""
    for name in "ab":
        growing = GrowingSnapshot(store, 0)
        growing.open()
        growing.add({name: np.ones(3, np.float32)})
        with (growing.path / JOURNAL).open("a") as file:
            file.write('{"folder": "')
    last = GrowingSnapshot(store, 0)
    last.open()
    assert sorted(last.leaves) == ["a", "b"]
    last.finish()
    assert store.versions() == (0,)


def test_two_stores_of_a_process_save_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of Orbax's saves at once make and remove each other's folders."""
    at_once, most = [0], [0]
    save = module.ocp.save

    def counted(*args: object) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        save(*args)
        at_once[0] -= 1

    monkeypatch.setattr(module.ocp, "save", counted)

    def publish_all(name: str) -> list[int]:
        own = SnapshotStore(tmp_path / name)
        for version in range(4):
            publish(own, version, params(version + 1.0))
        return list(own.versions())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(publish_all, ("snapshots", "checkpoints"))) == [[0, 1, 2, 3]] * 2
    assert most == [1]


def test_the_pointer_never_goes_back(store: SnapshotStore) -> None:
    publish(store, 2, params())
    publish(store, 1, params(2.0))
    assert store.versions() == (1, 2) and store.latest() == 2


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from rl_jax.snapshots import store as module
from rl_jax.snapshots.manifest import build_manifest

store = module.SnapshotStore(Path(sys.argv[1]))
for version in (0, 1):
    tree = {"w": np.full(4, version, np.float32)}
    manifest = build_manifest(tree, version, 0, "")
    if version == 1:
        real = module._replace
        def killed(path, text):
            if path.name == sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, text)
        module._replace = killed
    store.write(manifest, tree)
    store.commit(manifest)
    store.point(version)
"""


@pytest.mark.parametrize(("at", "versions"), [("COMMITTED", (0,)), ("latest", (0, 1))])
def test_a_writer_killed_before_the_marker_or_the_pointer(
    store: SnapshotStore, at: str, versions: tuple[int, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, store.root, at], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert store.versions() == versions and store.latest() == 0
    tree = {"w": jnp.ones(4)}
    publish(store, 1, tree)
    assert store.latest() == 1 and same(store.load(1, abstract(tree)), tree)


# --- damage --------------------------------------------------------------------------------------


def said_by(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_flipped_byte_is_noticed_or_harmless(damaged: SnapshotStore) -> None:
    files = [p for p in damaged.root.rglob("*") if p.is_file() and p.stat().st_size]
    noticed = set()
    for path in files:
        whole = path.read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            try:
                assert same(damaged.load(3, abstract(params())), params())
            except ValueError as error:
                assert "\n" not in str(error) and str(damaged.root / "3") in str(error)
                noticed.add(path.name)
        path.write_bytes(whole)
    assert {"manifest.json", "COMMITTED", "_METADATA"} < noticed


def test_files_that_orbax_needs_are_missed(damaged: SnapshotStore) -> None:
    shutil.rmtree(damaged.root / "3" / "weights")
    assert "is missing or not as COMMITTED has it" in said_by(
        lambda: damaged.load(3, abstract(params()))
    )


def test_other_weights_under_a_manifest_are_noticed(damaged: SnapshotStore, tmp_path: Path) -> None:
    other = SnapshotStore(tmp_path / "other")
    tree = params()
    tree["blocks"][1]["w"] = tree["blocks"][1]["w"].at[0, 0].add(1.0)
    publish(other, 3, tree)
    manifest = damaged.manifest(3)
    shutil.rmtree(damaged.root / "3" / "weights")
    shutil.copytree(other.root / "3" / "weights", damaged.root / "3" / "weights")
    (damaged.root / "3" / "COMMITTED").unlink()
    damaged.commit(manifest)  # every file as committed, but not what the manifest says
    said = said_by(lambda: damaged.load(3, abstract(params())))
    assert "blocks/1/w does not have its digest" in said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("3/COMMITTED", "0" * 64, "3/manifest.json is missing or not as COMMITTED has it"),
        ("3/COMMITTED", "", "3/manifest.json is missing or not as COMMITTED has it"),
        ("3/manifest.json", "{}", "3/manifest.json is missing or not as COMMITTED has it"),
        ("3/weights/state/_METADATA", "{}", "_METADATA is missing or not as COMMITTED has it"),
        ("latest", "three", "latest: 'three' is not a version number"),
    ],
)
def test_the_damaged_file_is_named(damaged: SnapshotStore, name: str, text: str, said: str) -> None:
    (damaged.root / name).write_text(text)
    assert said in said_by(lambda: (damaged.latest(), damaged.load(3, abstract(params()))))


def test_a_version_under_another_number_is_refused(damaged: SnapshotStore) -> None:
    (damaged.root / "3").rename(damaged.root / "4")
    assert "it is of version 3" in said_by(lambda: damaged.load(4, abstract(params())))


def test_a_missing_version_lists_the_others(damaged: SnapshotStore) -> None:
    assert "no such snapshot; there are [3]" in said_by(lambda: damaged.manifest(8))


def test_a_tree_that_does_not_fit_is_named(damaged: SnapshotStore) -> None:
    wide = params() | {"norm": jnp.ones(9)}
    assert "norm has shape [8], [9] expected" in said_by(lambda: damaged.load(3, abstract(wide)))
    more = params() | {"bias": jnp.ones(9)}
    assert "bias is in only one" in said_by(lambda: damaged.load(3, abstract(more)))


# --- pruning -------------------------------------------------------------------------------------


def test_prune_keeps_what_the_policy_keeps_and_the_latest(store: SnapshotStore) -> None:
    for version in range(4):
        publish(store, version, {"w": jnp.full(3, version)})
    assert store.prune(keep_last(2)) == (0, 1)
    assert store.versions() == (2, 3)
    assert store.prune(lambda versions: frozenset()) == (2,)
    assert store.versions() == (3,) and store.latest() == 3


def test_prune_leaves_what_is_being_written(store: SnapshotStore) -> None:
    publish(store, 0, {"w": jnp.zeros(3)})
    store.write(build_manifest({"w": jnp.ones(3)}, 1, 1, ""), {"w": jnp.ones(3)})
    store.prune(keep_last(1))
    assert (store.root / "1" / "manifest.json").is_file()


def test_a_kill_while_pruning_leaves_no_half_snapshot(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(2):
        publish(store, version, {"w": jnp.full(3, version)})

    def killed(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.prune(keep_last(1))
    assert store.versions() == (1,)


def test_a_relative_directory_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = SnapshotStore(Path("runs") / "a" / "snapshots")
    publish(own, 0, params())
    assert same(own.load(0, abstract(params())), params())


def test_nothing_written_says_where_it_lies(tmp_path: Path) -> None:
    tree, store = params(), SnapshotStore(tmp_path / "here")
    manifest = build_manifest(tree, 0, 0, "")
    store.write(manifest, tree)
    store.commit(manifest)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert same(SnapshotStore(tmp_path / "there").load(0, abstract(tree)), tree)
