"""A run's directory is there as a whole or not at all."""

from pathlib import Path

import pytest

from launch import run_directory
from launch.run_directory import create_run
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig


def test_who_looks_early_sees_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = tmp_path / "run", list[bool]()
    monkeypatch.setattr(run_directory, "keep_code", lambda config, where: seen.append(run.exists()))
    create_run(run, RunConfig(name="x"), "a = 1\n")
    assert seen == [False]
    assert sorted(path.name for path in run.iterdir()) == ["FORMAT", "config.toml"]
    assert list(tmp_path.iterdir()) == [run]


def test_what_another_made_meanwhile_is_left(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(
        run_directory, "keep_code", lambda config, where: (run / "own").mkdir(parents=True)
    )
    with pytest.raises(UserError, match="run: cannot be created"):
        create_run(run, RunConfig(name="x"), "a = 1\n")
    assert list(tmp_path.iterdir()) == [run] and [p.name for p in run.iterdir()] == ["own"]
