"""The notebooks run as they are, and hold what they showed."""

import re
import sys
from decimal import Decimal
from pathlib import Path

import nbformat
import pytest

from rl_jax import losses
from tests.notebooks.execute import copied, executed, paths

NAMES = {"build_a_loss", "compare_recipes", "write_a_transform"}
TIMED = {"write_a_transform"}
"""These train: they are slow, and what they show depends on how fast the machine is."""
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def told(cells: list[nbformat.NotebookNode]) -> str:
    """What the cells print."""
    return "\n".join(o.text for cell in cells for o in cell.outputs if o.output_type == "stream")


def check_same(now: str, then: str) -> None:
    """The words are equal, and numbers to 1 % or a unit of the last decimal that is shown."""
    assert NUMBER.sub("#", now).split() == NUMBER.sub("#", then).split()
    for new, old in zip(NUMBER.findall(now), NUMBER.findall(then), strict=True):
        unit = 10.0 ** int(Decimal(old).as_tuple().exponent)
        assert abs(float(new) - float(old)) <= 0.01 * abs(float(old)) + 1.01 * unit, (new, old)


def test_other_numbers_and_words_are_found() -> None:
    check_same("kept 0.957 of -1.2e-02", "kept  0.956 of -1.1e-02")
    for then in ("kept 0.940 of -1.2e-02", "kept 0.957 of 1.2e-02", "left 0.957 of -1.2e-02"):
        with pytest.raises(AssertionError):
            check_same("kept 0.957 of -1.2e-02", then)


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="which the extra `report` brings: pip install"):
        losses.plot(losses.recipes.dis())


def test_all_are_there() -> None:
    assert {path.stem for path in paths()} == NAMES


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.stem)
def test_outputs_are_stored(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], "in order"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs), "a picture"
    text = path.read_text()
    assert len(text) < 400_000, "pictures of modest size"
    # What only this machine has: folders of a user, or of a temporary copy.
    assert "/tmp/" not in text and "/home/" not in text and "/root/" not in text


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in TIMED), id=p.stem) for p in paths()],
)
def test_it_executes(path: Path, tmp_path: Path) -> None:
    stored = code_cells(path)
    notebook = executed(path, copied(tmp_path / "notebooks"))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # An exception of a cell is one of the execution; what else can go wrong is silence.
    for now, then in zip(cells, stored, strict=True):
        kinds = [[output.output_type for output in cell.outputs] for cell in (now, then)]
        assert set(kinds[0]) == set(kinds[1]), now.source
    if path.stem not in TIMED:
        check_same(told(cells), told(stored))
