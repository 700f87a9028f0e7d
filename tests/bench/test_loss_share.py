"""The bench of what a loss costs fails where the bound is broken."""

import sys

import pytest

from tests.bench import loss_share


@pytest.mark.parametrize(("loss", "status"), [(2.0, 0), (2.1, 1)])
def test_its_status_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, loss: float, status: int
) -> None:
    medians = {"step": 100.0, "dis": 0.5, "m2po": loss}
    monkeypatch.setattr(loss_share, "measure", lambda config, repeats: dict(medians))
    monkeypatch.setattr(sys, "argv", ["loss_share"])
    assert loss_share.main() == status
    assert f"| m2po | {loss:.3f} | 100.0 |" in capsys.readouterr().out
