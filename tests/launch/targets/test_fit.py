"""By `rl-jax plan`, what configs/pods puts on a device is less than it has."""

import json

import pytest

from launch.cli import main
from rl_jax.config.load import load
from tests.launch.targets.golden import PODS

# Of 27 layers whose backward pass is traced, a minute of CPU each.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", sorted(PODS.glob("*.toml")), ids=lambda p: p.stem)
def test_a_pod_fits(path, capsys: pytest.CaptureFixture[str]) -> None:
    chip = load(path).launch.chip
    assert main(["plan", "--model", str(path), "--chip", chip, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: own["fits"] for name, own in found.items()} == {"trainer": True, "sampler": True}
