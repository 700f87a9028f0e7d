"""Every command of launch/README.md, as far as it goes without its machines."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch import cli, start
from launch.cli import main
from tests.fakes.record import made_run, write_run
from tests.launch.targets import golden
from tests.structure.source import ROOT

TEXT = (ROOT / "launch" / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
OF_A_RUN = ("status", "logs", "watch", "stop")


def words(command: str) -> list[str]:
    program, *argv = shlex.split(command)
    assert program == "rl-jax"
    return argv


def of_cluster(command: str) -> bool:
    """Whether it renders, or would after which it starts."""
    return command.startswith("rl-jax") and "--out" in shlex.split(command)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("command", [own for own in COMMANDS if of_cluster(own)])
def test_it_renders(command: str, tmp_path: Path) -> None:
    _, *argv = words(command)
    argv[argv.index("--out") + 1] = str(tmp_path / "rendered")
    assert main(["render", *argv]) == 0


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("rl-jax run")])
def test_run_takes_it(command: str) -> None:
    given = cli._parser().parse_args(words(command))
    start.check_place(given)
    assert (ROOT / given.config).is_file()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is over."""
    run = write_run(tmp_path_factory.mktemp("runs") / "run", made_run())
    (run / "logs").mkdir()
    (run / "logs" / "trainer-0.log").write_text("a line\n")
    return run


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in OF_A_RUN])
def test_of_a_run(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(run) if word == "RUN" else word for word in words(command)]
    # It is over, so there is nothing to end.
    assert main(argv) == (2 if argv[0] == "stop" else 0)
    said = capsys.readouterr()
    assert said.out or f"{run} does not run: finished" in said.err


def test_a_job_is_submitted_from_where_it_was_rendered(tmp_path: Path) -> None:
    golden.render("qwen3_32b_h200_64", "slurm", out := tmp_path / "DIR")
    (command,) = [own for own in COMMANDS if "sbatch" in own]
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/bash\ntest -f "${!#}" -a -f plan.json\n')
    sbatch.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", command], cwd=out.parent, env=env, check=True)


def test_no_command_is_left_out_and_no_target() -> None:
    known = ("rl-jax run ", "rl-jax render ", *(f"rl-jax {own} " for own in OF_A_RUN))
    others = [own for own in COMMANDS if not own.startswith(known)]
    assert others == ["cd DIR && sbatch --time=24:00:00 job.sh"]
    told = {word for own in COMMANDS for word in shlex.split(own)}
    assert {*start.TARGETS, *golden.FORMS} - {"local"} <= told
