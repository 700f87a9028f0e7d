"""A run keeps the code it was started with, and uses it when it is taken up again."""

import subprocess
from pathlib import Path

import pytest

from launch import build, code
from launch.code import changed_packages, config_of, keep_code
from rl_jax.config.base import UserError
from rl_jax.config.load import load, resolved
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import write_format

TASK = """
def family(**settings):
    return "the task as it was"
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new run of a task in a file beside its configuration."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TASK)
    Path("c.toml").write_text('name = "small"\n[task]\nname = "mine.py:family"\n')
    run = Path("run")
    run.mkdir()
    config = load(Path("c.toml"))
    (run / "config.toml").write_text(resolved(config))
    keep_code(config, run)
    write_format(run)
    return run


def called(config: RunConfig) -> object:
    return build.imported(config.task.name, "task.name")()


def test_the_copy_is_used_where_the_file_is_changed_or_gone(run: Path) -> None:
    Path("mine.py").write_text("raise RuntimeError")
    assert called(config_of(run)) == "the task as it was"
    Path("mine.py").unlink()
    config = config_of(run)
    assert config.task.name == "run/code/mine.py:family"
    assert called(config) == "the task as it was"


def test_a_changed_copy_is_refused(run: Path) -> None:
    (run / "code" / "mine.py").write_text(TASK.replace("was", "was not"))
    with pytest.raises(UserError, match=r"run/code/mine\.py is not the file the run was started"):
        config_of(run)
    (run / "code" / "mine.py").unlink()
    with pytest.raises(UserError, match=r"run/code/mine\.py is not the file"):
        config_of(run)


def test_sums_are_those_of_sha256sum(run: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=run / "code", capture_output=True)
    assert done.returncode == 0 and done.stdout == b"mine.py: OK\n"


def test_a_named_task_needs_no_copy(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('name = "small"\n')
    config = load(tmp_path / "c.toml")
    (tmp_path / "config.toml").write_text(resolved(config))
    keep_code(config, tmp_path)
    write_format(tmp_path)
    assert config_of(tmp_path) == config


def test_changed_files_of_our_packages_are_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changed_packages(run) == []
    elsewhere = tmp_path / "elsewhere"
    for package in code.PACKAGES:
        for path in (code.ROOT / package).rglob("*.py"):
            copy = elsewhere / path.relative_to(code.ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(code, "ROOT", elsewhere)
    assert changed_packages(run) == []
    (elsewhere / "rl_jax" / "rng.py").write_text("SEED = 4")
    (elsewhere / "launch" / "new.py").write_text("")
    (elsewhere / "models" / "layers" / "mla.py").unlink()
    assert changed_packages(run) == ["launch/new.py", "models/layers/mla.py", "rl_jax/rng.py"]


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run: it has no config\.toml"):
        config_of(tmp_path)
