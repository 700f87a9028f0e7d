"""Teachers are snapshots of the same model; only those that the loss asks for are loaded."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from launch import build
from launch.warm_start import load_teachers
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, stateless
from rl_jax.sharding import make_mesh
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.store import SnapshotStore
from tests.fakes.bigram import bigram, table


@pytest.fixture(autouse=True)
def asking(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = stateless("asking", lambda scores, terms: (terms, {}), ["teacher(old)"])
    monkeypatch.setattr(build, "build_loss", lambda config: Loss(transform, token_mean))


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Version 3 of a bigram model of eight tokens."""
    store, params = SnapshotStore(tmp_path / "snapshots"), table(8, seed=4)
    manifest = build_manifest(params, 3, 0, "")
    store.write(manifest, params)
    store.commit(manifest)
    return tmp_path / "snapshots" / "3"


def loaded(vocab: int = 8, **teachers: Path | str) -> dict[str, dict[str, jax.Array]]:
    named = {name: str(path) for name, path in teachers.items()}
    config = RunConfig.model_validate({"name": "test", "teachers": named})
    return load_teachers(config, bigram(vocab), make_mesh(jax.devices(), 1, 1))


def test_what_the_loss_asks_for_is_loaded(snapshot: Path) -> None:
    found = loaded(old=snapshot, other="nowhere/0")
    assert found.keys() == {"old"}
    want = np.asarray(table(8, seed=4)["table"])
    assert np.asarray(found["old"]["table"]).tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("path", "vocab", "said"),
    [
        ("{root}", 8, "teachers.old = '{root}': needs a version's directory, as DIR/0"),
        ("{root}/4", 8, "teachers.old: {root}/4: no such snapshot; there are [3]"),
        ("{root}/3", 16, "teachers.old: {root}/3/weights: table has shape [8, 8], [16, 16]"),
    ],
)
def test_a_teacher_that_is_not_there_or_of_another_model(
    snapshot: Path, path: str, vocab: int, said: str
) -> None:
    root = snapshot.parent
    with pytest.raises(UserError, match="^" + re.escape(said.format(root=root))):
        loaded(vocab, old=path.format(root=root))
