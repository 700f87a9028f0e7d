"""How the process of a role ends."""

from pathlib import Path

import pytest

from launch.roles import entry
from launch.roles.base import Addresses, Role
from launch.stop import Stopped
from rl_jax.config.base import UserError


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UserError("no such thing"), 2, ["rl-jax: no such thing"]),
        (Stopped(Path("run"), 15), 143, None),
        (RuntimeError("the real reason"), 1, None),
    ],
)
def test_every_end_has_a_status(error, status, told, monkeypatch, capsys) -> None:
    """A fault too: the interpreter must not go on to its own end, where a world is waited for."""

    def play(role: Role) -> int:
        raise error

    monkeypatch.setattr(entry, "play", play)
    role = Role("trainer", Path("run"), 0.0, Addresses("", "", ()), "token")
    assert entry.status_of(role) == status
    said = capsys.readouterr().err.splitlines()
    assert said == told if told else str(error) in said[-1]
