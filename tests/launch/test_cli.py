"""[H] The command: every mistake is one line and status 2, and leaves the disk as it was."""

import errno
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from launch import cli
from launch.stop import Stopped
from rl_jax.config.base import UserError
from rl_jax.config.load import load
from rl_jax.replay.log import write_format
from tests.launch.test_summary import SUMMARY


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text('name = "small"\n')
    return tmp_path


@pytest.fixture
def local(monkeypatch):
    """A launcher in the place of the real one: `local.run_local` is what a test sets."""
    module, made = ModuleType("launch.local"), ModuleType("launch.finish")
    monkeypatch.setitem(sys.modules, "launch.local", module)
    monkeypatch.setitem(sys.modules, "launch.finish", made)
    module.run_local = lambda config, run_dir, reporter, *, began: None
    made.finish = lambda config, run_dir: SUMMARY
    return module


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def mistake(capsys, root: Path, *argv: str) -> str:
    """Runs the command, which must fail by one line on stderr and change nothing."""
    before = tree(root)
    assert cli.main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1 and said.err.endswith("\n")
    assert tree(root) == before
    return said.err


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("staleness.tua=2", "unknown key staleness.tua; did you mean staleness.tau?"),
        ('trainer.groups="16"', 'trainer.groups = "16": needs an integer, at least 1'),
        ("trainer.reset_at_push=1", "trainer.reset_at_push = 1: needs true or false"),
        ("staleness.tau=0", "staleness.tau = 0: needs an integer, at least 1"),
        ("trainer.push_every=0", "trainer.push_every = 0: needs an integer, at least 1"),
        ("loss.eps_low=1.5", 'loss.recipe = "dis": two_sided_mask: eps_low must lie in (0, 1)'),
        ("loss.eps_high=-1", 'loss.recipe = "dis": two_sided_mask: eps_high must be positive'),
        ("loss.eps_high=wide", 'loss.eps_high = "wide": needs a number'),
        ("loss.eps=0.2", 'unknown key loss.eps: "dis" takes eps_low, eps_high'),
        ("advantage.lam=0.2", 'unknown key advantage.lam: "standardised" takes epsilon'),
        ("task.name=chess", 'task.name = "chess": no such task; there is lookup'),
        ("rollout.top_p=0.9", "rollout.top_p = 0.9: must be 1.0: training requests"),
        ("mesh.sampler.data=8", "mesh.sampler needs 8 devices (data 8 x tensor 1) besides the 1"),
        ("rollout.in_flight=5000", "rollout.in_flight = 5000: needs at most sampler.sessions"),
    ],
)
def test_a_wrong_value(here, capsys, override, named):
    assert named in mistake(capsys, here, "run", "c.toml", "--set", override)


def test_a_wrong_file(here, capsys):
    assert "none.toml: no such file" in mistake(capsys, here, "run", "none.toml")
    Path("bad.toml").write_text('name = "x"\n\nseed == 3\n')
    assert "bad.toml: not valid TOML: Invalid value (at line 3" in mistake(
        capsys, here, "run", "bad.toml"
    )


@pytest.mark.parametrize(
    "argv", [[], ["run"], ["train", "c.toml"], ["run", "c.toml", "--sett", "a=1"]]
)
def test_a_wrong_command_line(here, capsys, argv):
    assert "--help)" in mistake(capsys, here, *argv)


def test_an_existing_run_directory(here, capsys):
    for name, kind in (("small", "dir"), ("file", "file")):
        path = Path("runs") / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if kind == "dir" else path.write_text("kept")
        said = mistake(capsys, here, "run", "c.toml", "--out", str(path))
        assert said == (
            f"rl-jax: runs/{name} exists and is left as it is: choose another with "
            f"--out runs/{name}-2, remove it, or go on with it by `rl-jax resume runs/{name}`\n"
        )
    assert "runs/small exists" in mistake(capsys, here, "run", "c.toml")


def test_a_run_directory_that_cannot_be(here, capsys, local):
    Path("file").write_text("kept")
    assert "file/x: cannot be created (Not a directory)" in mistake(
        capsys, here, "run", "c.toml", "--out", "file/x"
    )


def test_a_mistake_found_below_is_one_line_and_frees_the_name(here, capsys, local):
    def corrupt(config, run_dir, reporter, *, began):
        raise UserError("snapshots/3/policy: digest differs\nfrom its manifest")

    local.run_local = corrupt
    Path("runs").mkdir()
    said = mistake(capsys, here, "run", "c.toml")
    assert said == "rl-jax: snapshots/3/policy: digest differs from its manifest\n"


def test_a_mistake_found_after_something_was_written_keeps_it(here, capsys, local):
    def late(config, run_dir, reporter, *, began):
        (run_dir / "metrics.jsonl").touch()
        raise UserError("no")

    local.run_local = late
    assert cli.main(["run", "c.toml"]) == 2
    names = {p.name for p in Path("runs/small").iterdir()}
    assert names == {"config.toml", "FORMAT", "code", "metrics.jsonl"}


def test_a_run(here, capsys, local):
    seen = {}

    def run_local(config, run_dir, reporter, *, began):
        seen.update(config=config, run_dir=run_dir, text=(run_dir / "config.toml").read_text())
        reporter.note("working")

    local.run_local = run_local
    assert cli.main(["run", "c.toml", "--set", "seed=4", "--out", "elsewhere/r"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("working\nheld-out solve rate 0.50 -> 0.88\n")
    assert said.out.endswith("written to elsewhere/r: report.html shows it\n")
    assert seen["run_dir"] == Path("elsewhere/r")
    assert seen["config"].seed == 4
    assert seen["text"].startswith("# resolved from c.toml\nname = ")
    assert load(Path("elsewhere/r/config.toml")) == seen["config"]


def test_interrupted(here, capsys, local):
    def interrupt(config, run_dir, reporter, *, began):
        raise KeyboardInterrupt

    local.run_local = interrupt
    assert cli.main(["run", "c.toml"]) == 130
    assert capsys.readouterr().err == "rl-jax: interrupted; what a run wrote so far is kept\n"


def test_stopped(here, capsys, local):
    def stop(config, run_dir, reporter, *, began):
        raise Stopped(run_dir, signal.SIGTERM)

    def later(config, run_dir, reporter, *, began):
        (run_dir / "metrics.jsonl").touch()
        stop(config, run_dir, reporter, began=began)

    local.run_local = stop
    assert cli.main(["run", "c.toml"]) == 143
    assert capsys.readouterr().err == (
        "rl-jax: stopped by SIGTERM before the run wrote anything: start it again\n"
    )
    local.run_local = later
    assert cli.main(["run", "c.toml"]) == 143
    assert capsys.readouterr().err == (
        "rl-jax: stopped by SIGTERM; go on with `rl-jax resume runs/small`\n"
    )


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("out of memory"), Stopped(Path("x"), None)]
)
def test_whatever_ends_a_run_that_wrote_nothing_frees_its_name(here, local, error):
    def fail(config, run_dir, reporter, *, began):
        raise error

    local.run_local = fail
    with suppress(RuntimeError):
        cli.main(["run", "c.toml"])
    assert not Path("runs/small").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_disk_that_cannot_be_written_is_one_line(here, capsys, local, number, wrapped):
    def write(config, run_dir, reporter, *, began):
        try:
            raise OSError(number, os.strerror(number), "journal/000000.journal")
        except OSError as error:
            if not wrapped:
                raise
            raise OSError(f"the journal cannot be written\n({error})") from error

    local.run_local = write
    assert cli.main(["run", "c.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rl-jax: ") and said.count("\n") == 1 and os.strerror(number) in said


def test_another_error_of_the_system_is_no_mistake(here, local):
    def broken(config, run_dir, reporter, *, began):
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    local.run_local = broken
    with pytest.raises(ConnectionResetError):
        cli.main(["run", "c.toml"])


@pytest.fixture
def old(here):
    """A run of a version that wrote no FORMAT file."""
    run = here / "runs" / "old"
    (run / "journal").mkdir(parents=True)
    (run / "journal" / "000000.journal").write_bytes(b"")
    (run / "trajectories").mkdir()
    (run / "metrics.jsonl").write_text("")
    (run / "config.toml").write_text('name = "old"\n')
    return run


@pytest.mark.parametrize("command", ["resume", "replay", "report", "show", "events"])
def test_a_run_of_an_older_format(old, here, capsys, command):
    more = ["lookup/1/0"] if command == "show" else []
    said = mistake(capsys, here, command, "runs/old", *more)
    assert said == "rl-jax: runs/old: a run of format 1 (or unknown); this version reads format 2\n"


@pytest.mark.parametrize("command", ["resume", "replay", "report", "show", "events"])
def test_no_run(here, capsys, command):
    more = ["lookup/1/0"] if command == "show" else []
    assert "runs/none is no run: it has no config.toml" in mistake(
        capsys, here, command, "runs/none", *more
    )


def test_snapshots_that_are_a_file(here, capsys):
    """Nothing was published, so the run would begin anew: it cannot."""
    run = here / "runs" / "r"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('name = "r"\n')
    write_format(run)
    (run / "snapshots").write_text("kept")
    said = mistake(capsys, here, "resume", "runs/r")
    assert said == "rl-jax: runs/r/snapshots: must be a directory that can be written\n"


def test_a_crash_is_not_hidden(here, local):
    def crash(config, run_dir, reporter, *, began):
        raise ValueError("a bug")

    local.run_local = crash
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["run", "c.toml"])


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["--version"]])
def test_help_and_version(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(("usage: rl-jax", "rl-jax 0."))


def test_help_and_mistakes_import_no_jax(here):
    import subprocess

    code = (
        "import sys, launch.cli as c; c.main(['run', 'c.toml', '--set', 'seed=-1']);"
        "sys.exit('jax' in sys.modules)"
    )
    root = str(Path(cli.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": root}, check=False)
    assert done.returncode == 0
