"""A run keeps the code it was started with, and uses it when it is taken up again."""

import subprocess
from pathlib import Path

import pytest

from launch import code, compose
from launch.code import changed_packages, check_teachers, config_of, keep_code, located
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
    return compose.imported(config.task.name, "task.name")()


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


def test_a_teacher_stays_where_and_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / "old" / "3" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    teachers = {"a": "old/3", "not_there": "none/0"}
    config = located(RunConfig.model_validate({"name": "small", "teachers": teachers}))
    assert config.teachers["a"] == str(manifest.parent)
    assert load(written(config, tmp_path)) == config
    (tmp_path / "run").mkdir()
    keep_code(config, tmp_path / "run")
    monkeypatch.chdir(manifest.parent)
    check_teachers(config, tmp_path / "run")
    manifest.write_text("{ }")
    with pytest.raises(UserError, match=r"old/3 is not the teacher that .*/run was started with"):
        check_teachers(config, tmp_path / "run")
    manifest.unlink()
    with pytest.raises(UserError, match=r"old/3 is not the teacher"):
        check_teachers(config, tmp_path / "run")


def written(config: RunConfig, folder: Path) -> Path:
    file = folder / "resolved.toml"
    file.write_text(resolved(config))
    return file


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run: it has no config\.toml"):
        config_of(tmp_path)


OWN = """
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss

def own(scale: float = {scale}):
    return Loss(chain(policy_gradient()), token_mean)
"""


def kept_with(tmp_path: Path, text: str) -> Path:
    Path("c.toml").write_text(f'name = "small"\n{text}')
    config = load(Path("c.toml"))
    run = tmp_path / "of-own"
    run.mkdir()
    (run / "config.toml").write_text(resolved(compose.with_defaults(config)))
    keep_code(config, run)
    write_format(run)
    return run


def test_loss_and_advantage_in_one_file_are_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adds = "\nfrom rl_jax.advantages import group_mean as ours\n\ndef mean():\n    return ours()\n"
    Path("own.py").write_text(OWN.format(scale=0.5) + adds)
    named = '[loss]\nrecipe = "own.py:own"\n[advantage]\nname = "own.py:mean"\n'
    run = kept_with(tmp_path, named)
    assert sorted(p.name for p in (run / "code").iterdir()) == ["PACKAGES", "SHA256SUMS", "own.py"]
    # The original changes, in its code and in its default: the run has its own of both.
    Path("own.py").write_text(OWN.format(scale=9.0) + "raise RuntimeError")
    config = config_of(run)
    assert config.imports == {
        "task": "lookup",
        "loss": f"{run}/code/own.py:own",
        "advantage": f"{run}/code/own.py:mean",
    }
    assert config.loss.keywords == {"scale": 0.5}
    compose.build_loss(config), compose.build_advantage(config)
    (run / "code" / "own.py").write_text(OWN.format(scale=9.0))
    with pytest.raises(UserError, match=r"code/own\.py is not the file the run was started with"):
        config_of(run)


def test_files_of_one_name_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
    Path("a/mine.py").write_text(TASK)
    Path("b/mine.py").write_text(OWN.format(scale=0.5))
    named = '[task]\nname = "a/mine.py:family"\n[loss]\nrecipe = "b/mine.py:own"\n'
    run = kept_with(tmp_path, named)
    config = config_of(run)
    assert config.imports["task"] == f"{run}/code/mine.py:family"
    assert config.imports["loss"] == f"{run}/code/mine-2.py:own"
    assert called(config) == "the task as it was"
    compose.build_loss(config)


def test_all_that_is_named_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a resume, and by roles that stand in another directory before there is a run."""
    for folder in ("here: one", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(here := tmp_path / "here: one")
    Path("mine.py").write_text(TASK)
    named = 'name = "mine.py:family"\ntokenizer = "kept"\n[warm_start]\nsnapshot = "kept/0"\n'
    Path("c.toml").write_text(f'name = "small"\n[teachers]\na = "../b"\n[task]\n{named}')
    config = located(load(Path("c.toml")))
    run = here / "run"
    run.mkdir()
    (run / "config.toml").write_text(resolved(config))
    keep_code(config, run)
    write_format(run)
    monkeypatch.chdir(tmp_path / "there")
    assert load(run / "config.toml") == config, "its files are there"
    assert called(config) == "the task as it was"
    Path("../here: one/mine.py").unlink()
    kept = config_of(run)
    assert called(kept) == "the task as it was"
    assert kept.task.tokenizer == f"{here}/kept" and kept.warm_start.snapshot == f"{here}/kept/0"
    assert kept.teachers == {"a": f"{here}/../b"}


def test_a_shipped_tokenizer_is_found_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.ROOT)
    config = load(Path("configs/smollm2_135m.toml"))
    assert config.task.tokenizer == "checkpoints/smollm2"
    assert located(config).task.tokenizer == f"{code.ROOT}/checkpoints/smollm2"
