"""Executes the notebooks as a person would, each in a kernel of its own, in a copy of their folder.

`python -m tests.notebooks.execute [NAME ...]` stores what they show; `make notebooks` calls it.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
CELL_S = 300
"""Seconds that one cell may take."""


def paths() -> list[Path]:
    """The notebooks of the repository."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of an execution in `folder`, a copy of its own."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
        startup_timeout=CELL_S,
        # It would warn that it listens on a port of this machine.
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    # Of this tree, and with the devices of a user: the tests have eight.
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    client.execute(env=own | {"PYTHONPATH": str(ROOT)})
    return notebook


def copied(folder: Path) -> Path:
    """A copy of the notebooks' folder that a run may write into."""
    return Path(shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("runs", "__*", ".*")))


def store(path: Path) -> None:
    """Executes the notebook and writes it back with what it shows."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(path, copied(Path(folder) / "notebooks"))
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata.get("language_info", {}).pop("version", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in paths():
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            print(path.relative_to(ROOT), flush=True)
            store(path)
