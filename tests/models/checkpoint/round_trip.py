"""An import and its export, held to each other."""

from pathlib import Path

from launch import cli


def comes_back(given: Path, place: Path) -> Path:
    """Where `given`, of four files, comes back byte for byte."""
    kept, out = place / "kept", place / "out"
    assert cli.main(["import", str(given), "--out", str(kept)]) == 0
    assert cli.main(["export", str(kept / "0"), "--out", str(out)]) == 0
    names = sorted(path.name for path in given.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names and len(names) == 4
    assert all((out / n).read_bytes() == (given / n).read_bytes() for n in names)
    return out
