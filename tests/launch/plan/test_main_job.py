"""The forecast of the quickstart from its own rates, against what it did."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli
from tests.structure.source import ROOT

LONGEST_S = 3600.0


@pytest.mark.slow
def test_the_quickstart_does_what_is_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Throughput and lag within 15 %, by either way; the two ways within 10 % of each other."""
    out = tmp_path / "run"
    command = (sys.executable, "-m", "launch.cli", "run", "configs/quickstart.toml", "--out", out)
    subprocess.run(command, cwd=ROOT, check=True, timeout=LONGEST_S, stdout=subprocess.DEVNULL)
    capsys.readouterr()
    assert cli.main(["plan", "--fit", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    measured, simulated, closed = (told[n] for n in ("measured", "simulated", "closed form"))
    for name in ("tokens_per_s", "lag_mean"):
        assert simulated[name] == pytest.approx(measured[name], rel=0.15), name
        assert closed[name] == pytest.approx(measured[name], rel=0.15), name
        assert closed[name] == pytest.approx(simulated[name], rel=0.1), name
