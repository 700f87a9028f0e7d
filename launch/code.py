"""[H] The code of a run: copies of the files its configuration names, and digests of the packages'.

`code/` in the run's directory holds the copies and `SHA256SUMS`, which `sha256sum -c` reads;
`code/PACKAGES` has the digests of our own packages at the start, `code/TEACHERS` those of the
manifests of its teachers. A resumed run and a replay use the copies.
"""

import hashlib
import shutil
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.config.run import Directories, RunConfig, file_of
from rl_jax.replay.log import check_format

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rl_jax", "models", "launch")
SUMS, OWN, TEACHERS = "SHA256SUMS", "PACKAGES", "TEACHERS"


def located(config: RunConfig) -> RunConfig:
    """The same with absolute paths of all files and directories that it names: a run's roles may
    stand, it may be resumed, and its versions exported, elsewhere."""
    named = {section: f"{file.absolute()}:{name}" for section, file, name in _files(config)}
    config = config.with_imports(named)
    where = {key: str(Path(path).absolute()) for key, path in directories(config).items()}
    teachers = Directories({name: where[f"teachers.{name}"] for name in config.teachers})
    task = config.task.model_copy(update={"tokenizer": where.get("task.tokenizer")})
    own = config.warm_start.model_copy(update={"snapshot": where.get("warm_start.snapshot")})
    return config.model_copy(update={"teachers": teachers, "task": task, "warm_start": own})


def directories(config: RunConfig) -> dict[str, str]:
    """Those that `config` names, by key."""
    found = {
        "task.tokenizer": config.task.tokenizer,
        "warm_start.snapshot": config.warm_start.snapshot,
        **{f"teachers.{name}": where for name, where in config.teachers.items()},
    }
    return {key: where for key, where in found.items() if where is not None}


def carried(config: RunConfig, folder: str) -> tuple[RunConfig, dict[Path, str]]:
    """The same over copies of the files that it names, which are to lie in `folder` ("" or one that
    ends with /); and those files, each with the name of its copy, which every cluster takes."""
    copies: dict[Path, str] = {}
    named: dict[str, str] = {}
    for section, file, name in _files(config):
        named[section] = f"{folder}{copies.setdefault(file, f'{section}.py')}:{name}"
    return config.with_imports(named), copies


def keep_code(config: RunConfig, run_dir: Path) -> None:
    """Copies what `config` names into a new run."""
    folder = run_dir / "code"
    folder.mkdir()
    copies = [folder / name for name in _copies(config).values()]
    for file, copy in zip(_copies(config), copies, strict=True):
        shutil.copy2(file, copy)
    (folder / SUMS).write_text("".join(_sum(copy, folder) for copy in copies))
    (folder / OWN).write_text("".join(_sums_of_packages()))
    if config.teachers:
        (folder / TEACHERS).write_text("".join(_sums_of_teachers(config)))


def config_of(run_dir: Path) -> RunConfig:
    """The configuration that a run was started with, over its own copies of files.

    Raises UserError where it is no run, one of another format, or where a copy was changed.
    """
    if not (run_dir / "config.toml").is_file():
        raise UserError(f"{run_dir} is no run: it has no config.toml; `rl-jax list` names runs")
    try:
        check_format(run_dir)
    except ValueError as error:
        raise UserError(str(error)) from None
    folder = run_dir / "code"
    kept = set()
    for line in _lines(folder / SUMS):
        name = line.partition("  ")[2]
        if not (folder / name).is_file() or _sum(folder / name, folder) != line + "\n":
            raise UserError(f"{folder / name} is not the file the run was started with")
        kept.add(name)
    config = load(run_dir / "config.toml", check_files=not kept)
    copies = {file: folder / name for file, name in _copies(config).items() if name in kept}
    changed = {
        section: f"{copies[file]}:{name}"
        for section, file, name in _files(config)
        if file in copies
    }
    return config.with_imports(changed)


def check_teachers(config: RunConfig, run_dir: Path) -> None:
    """UserError where a teacher is gone, or another than when the run was started."""
    now = set(_sums_of_teachers(config))
    for line in _lines(run_dir / "code" / TEACHERS):
        if line + "\n" not in now:
            where = Path(line.partition("  ")[2]).parent
            raise UserError(f"{where} is not the teacher that {run_dir} was started with")


def changed_packages(run_dir: Path) -> list[str]:
    """Files of our packages that are not what they were when the run was started."""
    then = set(_lines(run_dir / "code" / OWN))
    now = {line.rstrip("\n") for line in _sums_of_packages()}
    return sorted({line.partition("  ")[2] for line in then ^ now}) if then else []


def _files(config: RunConfig) -> Iterator[tuple[str, Path, str]]:
    """(section, file, name in it) of each import from a file."""
    for section, name in config.imports.items():
        if (file := file_of(name)) is not None:
            yield section, file, name.rpartition(":")[2]


def _copies(config: RunConfig) -> dict[Path, str]:
    """The files that `config` names, each with the name of its copy."""
    copies: dict[Path, str] = {}
    for _, file, _ in _files(config):
        if file not in copies:
            names = chain([file.name], (f"{file.stem}-{n}.py" for n in count(2)))
            copies[file] = next(name for name in names if name not in copies.values())
    return copies


def _sums_of_packages() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield _sum(path, ROOT)


def _sums_of_teachers(config: RunConfig) -> Iterator[str]:
    """Of their manifests, which have the digest of every leaf."""
    for directory in config.teachers.values():
        if (manifest := Path(directory) / "manifest.json").is_file():
            yield _sum(manifest)


def _sum(path: Path, base: Path | None = None) -> str:
    """The line that sha256sum writes."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{digest}  {(path.relative_to(base) if base else path).as_posix()}\n"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
