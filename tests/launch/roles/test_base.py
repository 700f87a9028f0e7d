"""What a role's process is told, and where roles meet."""

from pathlib import Path

from launch.roles.base import Addresses, Role, addresses


def test_a_role_travels_through_the_environment_whole() -> None:
    where = Addresses("unix:/a/link", "unix:/a/queue", ("unix:/a/s0", "unix:/a/s1"))
    role = Role("sampler-1", Path("/runs/ä b"), 1234.5625, where, "a secret")
    env = role.to_env()
    assert Role.from_env({"PATH": "x", **env}) == role
    assert [name for name, value in env.items() if "a secret" in value] == ["RL_JAX_TOKEN"]


def test_sockets_or_consecutive_ports() -> None:
    assert addresses("unix", 2, Path("/tmp/x")) == Addresses(
        "unix:/tmp/x/link", "unix:/tmp/x/queue", ("unix:/tmp/x/s0", "unix:/tmp/x/s1")
    )
    assert addresses("tcp:127.0.0.1:7000", 2, Path("unused")) == Addresses(
        "tcp:127.0.0.1:7000",
        "tcp:127.0.0.1:7001",
        ("tcp:127.0.0.1:7002", "tcp:127.0.0.1:7003"),
    )
    assert addresses("tcp::7000", 1, Path("unused")).samplers == ("tcp::7002",)
