"""`rl_jax.run`: which functions a run can keep; a child that is heard, stopped and never left."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import rl_jax
from launch.notebook import ROOT, name_of
from rl_jax.config.base import UserError
from rl_jax.losses import recipes

LOSS = """
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import policy_gradient
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss

def soft(scale: float = 1.0):
    return Loss(chain(policy_gradient()), token_mean)

renamed = soft
short = lambda: soft()

def outer():
    def inner():
        return soft()
    return inner

class Losses:
    def method(self):
        return soft()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration and a file of losses, from which both can be named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # One with the working directory in it would let a child find what it must not.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
    Path("own_losses.py").write_text(LOSS)
    Path("c.toml").write_text('name = "small"\n[loss]\neps_low = 0.3\n')
    return tmp_path


def module_here(here: Path):
    import own_losses  # pyright: ignore[reportMissingImports] made by the fixture

    return own_losses


def in_a_cell() -> Callable:
    """A function as a notebook's cell, or a script, defines it."""
    function = eval("lambda: None")
    function.__name__ = function.__qualname__ = "soft"
    function.__module__ = "__main__"
    return function


def test_a_function_is_named_by_its_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module_here(here)
    assert name_of("loss", own.soft) == "own_losses.py:soft"
    (here / "below").mkdir()
    monkeypatch.chdir("below")
    assert name_of("loss", own.soft) == f"{here}/own_losses.py:soft"


def test_a_function_of_a_package_is_named_by_its_module() -> None:
    assert name_of("loss", recipes.dis) == "rl_jax.losses.recipes:dis"
    assert name_of("loss", "grpo") == "grpo"


FILE = "write a function at the top level of a .py file"


def test_what_a_function_returns_is_none(here: Path) -> None:
    with pytest.raises(UserError, match=r"^loss is Loss\(.*needs a function, not what it returns$"):
        name_of("loss", module_here(here).soft())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda own: own.short, "advantage is a lambda; a run keeps the file of its advantage: "),
        (lambda own: own.outer(), "advantage is inner, made inside outer; a run keeps the file"),
        (lambda own: in_a_cell(), "advantage is soft, defined in the notebook or script itself; "),
        (lambda own: own.Losses.method, "advantage is Losses.method, which own_losses does not"),
        (lambda own: partial(own.soft, scale=2.0), "advantage is functools.partial(<function soft"),
        (lambda own: own.Losses, "advantage is <class 'own_losses.Losses'>, needs a function"),
    ],
)
def test_what_a_run_cannot_keep(here: Path, made: Callable, said: str) -> None:
    function = made(module_here(here))
    with pytest.raises(UserError) as caught:
        rl_jax.run("c.toml", advantage=function)
    message = str(caught.value)
    assert message.startswith(said) and "\n" not in message
    assert FILE in message or "give its keywords with set={'advantage.KEYWORD': ...}" in message
    assert not Path("runs").exists()


def test_the_name_under_which_it_is_held_counts(here: Path) -> None:
    own = module_here(here)
    assert name_of("loss", own.renamed) == "own_losses.py:soft"
    del own.soft
    with pytest.raises(UserError, match="loss is soft, which own_losses does not hold"):
        name_of("loss", own.renamed)


def test_a_mistake_in_the_configuration_needs_no_child(here: Path) -> None:
    with pytest.raises(UserError, match=r"--set: staleness\.tau = 0: needs an integer"):
        rl_jax.run("c.toml", set={"staleness.tau": 0})
    assert not Path("runs").exists()


def test_none_is_refused_by_name(here: Path) -> None:
    with pytest.raises(UserError, match=r"^set: loss\.eps_high is None, which TOML has not"):
        rl_jax.run("c.toml", set={"loss.eps_high": None})


def test_a_file_that_imports_its_neighbour_fails_at_the_start(here: Path) -> None:
    """Of the two, the run could keep and replay one."""
    Path("neighbour.py").write_text("")
    Path("importing.py").write_text("import neighbour\n" + LOSS)
    with pytest.raises(UserError, match=r"importing\.py:soft' cannot be imported: No module named"):
        rl_jax.run("c.toml", loss="importing.py:soft", out="new")
    assert not Path("new").exists()


def test_a_mistake_that_the_child_finds(here: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError) as caught:
        rl_jax.run("c.toml", loss=module_here(here).soft, set={"loss.scal": 1.0}, out="new")
    said = 'unknown key loss.scal: "own_losses.py:soft" takes scale'
    assert str(caught.value) == said
    assert capsys.readouterr().out == f"rl-jax: {said}\n"
    assert not Path("new").exists()


PARENT = """
import sys
from pathlib import Path
import rl_jax
from launch import notebook
notebook.PROGRAM = (sys.executable, "-u", "-c", Path("child.py").read_text())
try:
    print(rl_jax.run("c.toml", set={"seed": 3}, out="new"))
except BaseException as error:
    print(type(error).__name__, error)
"""
CHILD = """
import os, signal, sys
from pathlib import Path
from launch.engine.child import follow_parent
waited_for = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
follow_parent()
print("started", os.getpid(), *sys.argv[1:])
"""


def started(here: Path, child: str) -> tuple[subprocess.Popen[str], int]:
    """A process that runs `child` by rl_jax.run, and the child's pid once it says it."""
    Path("child.py").write_text(CHILD + child)
    parent = subprocess.Popen(
        [sys.executable, "-u", "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    word, pid, *arguments = parent.stdout.readline().split()
    assert word == "started"
    assert arguments == ["run", "c.toml", "--out", "new", "--set", "seed=3"]
    return parent, int(pid)


def test_lines_are_heard_while_the_child_runs_and_the_summary_is_read(here: Path) -> None:
    child = """
signal.sigwait(waited_for)
Path("new").mkdir()
Path("new/summary.json").write_text('{"steps": 2}')
"""
    parent, pid = started(here, child)
    os.kill(pid, signal.SIGTERM)
    said, _ = parent.communicate(timeout=60)
    assert said == "Run(path=PosixPath('new'), summary={'steps': 2})\n"


def test_an_interrupt_is_handed_on_and_the_child_may_end_in_order(here: Path) -> None:
    child = "print('heard', int(signal.sigwait(waited_for)))\nos._exit(130)\n"
    parent, _ = started(here, child)
    parent.send_signal(signal.SIGINT)
    said, _ = parent.communicate(timeout=60)
    assert said == f"heard {int(signal.SIGINT)}\nKeyboardInterrupt \n"


def test_a_failure_is_told_by_the_last_line(here: Path) -> None:
    parent, pid = started(here, "signal.sigwait(waited_for)\nprint('out of luck')\nos._exit(7)\n")
    os.kill(pid, signal.SIGTERM)
    said, _ = parent.communicate(timeout=60)
    assert said == "out of luck\nRuntimeError the run ended with status 7: out of luck\n"


def test_the_child_does_not_outlive_its_parent(here: Path) -> None:
    parent, pid = started(here, "signal.sigwait({signal.SIGUSR1})\n")
    # A pipe that the child holds open ends when it does.
    parent.kill()
    parent.wait(timeout=60)
    descriptor = os.pidfd_open(pid)
    assert select.select([descriptor], [], [], 60)[0], "the child lives on"
    os.close(descriptor)
