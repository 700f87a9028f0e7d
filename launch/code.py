"""[H] The code of a run: copies of the files its configuration names, and digests of the packages'.

`code/` in the run's directory holds the copies and `SHA256SUMS`, which `sha256sum -c` reads;
`code/PACKAGES` has the digests of our own packages at the start. A resumed run and a replay use the
copies.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import check_format

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rl_jax", "models", "launch")
SUMS, OWN = "SHA256SUMS", "PACKAGES"


def keep_code(config: RunConfig, run_dir: Path) -> None:
    """Copies what `config` names into a new run."""
    folder = run_dir / "code"
    folder.mkdir()
    copies = [shutil.copy2(file, folder / file.name) for file in _named(config)]
    (folder / SUMS).write_text("".join(_sum(Path(copy), folder) for copy in copies))
    (folder / OWN).write_text("".join(_sums_of_packages()))


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
    overrides = []
    for line in _lines(folder / SUMS):
        name = line.partition("  ")[2]
        if not (folder / name).is_file() or _sum(folder / name, folder) != line + "\n":
            raise UserError(f"{folder / name} is not the file the run was started with")
        overrides.append(name)
    config = load(run_dir / "config.toml", check_files=not overrides)
    file, colon, attribute = config.task.name.rpartition(":")
    if colon and Path(file).name in overrides:
        name = f"{folder / Path(file).name}:{attribute}"
        return config.model_copy(update={"task": config.task.model_copy(update={"name": name})})
    return config


def changed_packages(run_dir: Path) -> list[str]:
    """Files of our packages that are not what they were when the run was started."""
    then = set(_lines(run_dir / "code" / OWN))
    now = {line.rstrip("\n") for line in _sums_of_packages()}
    return sorted({line.partition("  ")[2] for line in then ^ now}) if then else []


def _named(config: RunConfig) -> Iterator[Path]:
    file = Path(config.task.name.rpartition(":")[0])
    if file.suffix == ".py":
        yield file


def _sums_of_packages() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield _sum(path, ROOT)


def _sum(path: Path, base: Path) -> str:
    """The line that sha256sum writes."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{digest}  {path.relative_to(base).as_posix()}\n"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
