"""What a machine is told of its launch, and what is wrong with that."""

from pathlib import Path

import pytest

from launch import role
from launch.cli import main
from launch.site import read_site
from launch.spec import RunSpec, make_plan
from rl_jax.config.run import RunConfig

CONFIG = {
    "name": "x",
    "launch": {"trainer": {"count": 1, "devices": 1}, "sampler": {"count": 1, "devices": 1}},
}
PLAN = make_plan(RunSpec(RunConfig.model_validate(CONFIG), "run"))


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a plan and a token, as an attempt finds them."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(PLAN.model_dump_json())
    Path("token").write_text("secret\n")
    Path("token").chmod(0o600)
    for name in ("RL_JAX_TOKEN", "RL_JAX_HOSTS", "RL_JAX_HOSTS_FILE", "RL_JAX_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RL_JAX_TOKEN_FILE", "token")
    monkeypatch.setenv("RL_JAX_HOSTS", "a,b")
    return tmp_path


def test_the_site_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_site(PLAN) == (("a", "b"), "secret", 0)
    monkeypatch.setenv("RL_JAX_TOKEN", "other")
    monkeypatch.setenv("RL_JAX_ATTEMPT", "3")
    monkeypatch.delenv("RL_JAX_HOSTS")
    monkeypatch.setenv("RL_JAX_HOSTS_FILE", "hosts")
    Path("hosts").write_text("c\nd\n")
    assert read_site(PLAN) == (("c", "d"), "other", 3)


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        (["--host", "0"], {"RL_JAX_HOSTS": "a"}, "RL_JAX_HOSTS names 1 hosts, the plan has 2"),
        (["--host", "0"], {"RL_JAX_TOKEN_FILE": ""}, "no token: RL_JAX_TOKEN_FILE names a file"),
        (["--host", "0"], {"RL_JAX_TOKEN_FILE": "none"}, "none: cannot be read (No such file"),
        (["--host", "0"], {"RL_JAX_ATTEMPT": "x"}, "RL_JAX_ATTEMPT = x: needs a number"),
        (["--host", "2"], {}, "--host 2: nothing stands there; the plan has 2 hosts"),
        (["sampler-1"], {}, "no role sampler-1 in the plan of x; there is trainer, orchestrator"),
        (["sampler-0", "--rank", "1"], {}, "sampler-0 has 1 processes, so no rank 1"),
        ([], {}, "needs NAME or --host N"),
        (["trainer", "--host", "0"], {}, "needs NAME or --host N"),
    ],
)
def test_what_is_wrong_is_one_line(
    argv: list[str],
    env: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["role", *argv, "--plan", "plan.json"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not Path("run").exists(), "nothing was started"


def test_an_open_or_empty_token(capsys: pytest.CaptureFixture[str]) -> None:
    Path("token").chmod(0o640)
    assert main(["role", "trainer", "--plan", "plan.json"]) == 2
    assert "token has mode 640, so others may read the token" in capsys.readouterr().err
    Path("token").chmod(0o600)
    Path("token").write_text("")
    assert main(["role", "trainer", "--plan", "plan.json"]) == 2
    assert "token is empty" in capsys.readouterr().err


def test_a_run_that_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/summary.json").write_text("{}")
    assert main(["role", "sampler-0", "--plan", "plan.json"]) == 0
    assert "run is finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "completed", "done", "status"),
    [(1, True, False, 42), (1, False, False, 42), (1, False, True, 0), (0, False, False, 42)],
)
def test_a_stop_before_the_end_is_told(
    host: int, completed: bool, done: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only samplers stand, which end with 0 whenever they are told to."""
    Path("run").mkdir()
    Path("run/FORMAT").touch()

    async def supervise(*_: object) -> bool:
        if done:
            Path("run/summary.json").touch()
        return completed

    monkeypatch.setattr(role, "_supervise", supervise)
    assert main(["role", "--host", str(host), "--plan", "plan.json"]) == status
