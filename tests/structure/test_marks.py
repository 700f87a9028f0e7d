"""Marks: what a file says of itself in the first characters of its docstring is true."""

import ast
from pathlib import Path

import pytest

from tests.structure.source import Source, imported_modules, our_modules, sources

EFFECTS = {
    "asyncio",
    "threading",
    "time",
    "os",
    "logging",
    "random",
    "io",
    "multiprocessing",
    "secrets",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
}
EFFECTFUL_NAMES = {"open", "print", "input"}
EFFECTFUL_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "unlink"}
WITH_CODE = [source for source in sources() if source.has_code]
PURE = [source for source in WITH_CODE if source.mark in ("P", "N")]


def effects(source: Source) -> list[str]:
    """What of clock, threads, chance, files or output `source` touches."""
    found = [
        f"imports {name}"
        for name in imported_modules(source, our_modules())
        if name.split(".")[0] in EFFECTS
    ]
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in EFFECTFUL_NAMES:
                found.append(f"calls {name} in line {node.lineno}")
            case ast.Call(func=ast.Attribute(attr=name)) if name in EFFECTFUL_METHODS:
                found.append(f"calls .{name} in line {node.lineno}")
            case ast.Global() | ast.Nonlocal():
                found.append(f"rebinds an outer name in line {node.lineno}")
    return found


@pytest.mark.parametrize("source", WITH_CODE, ids=lambda s: s.name)
def test_docstring_begins_with_a_mark(source: Source) -> None:
    assert source.mark, "the docstring must begin with [P], [N] or [H]"


@pytest.mark.parametrize("source", PURE, ids=lambda s: s.name)
def test_pure_files_have_no_effects(source: Source) -> None:
    assert not effects(source)


@pytest.mark.parametrize("source", PURE, ids=lambda s: s.name)
def test_pure_files_import_no_file_with_effects(source: Source) -> None:
    marks = {other.module: other.mark for other in sources()}
    assert "H" not in {marks.get(name) for name in imported_modules(source, our_modules())}


def test_effects_are_found() -> None:
    text = "import os.path\nfrom time import time\nprint(open('x'))\nPath('x').read_text()\n"
    source = Source(Path(__file__), "rl_jax.x", text, ast.parse(text))
    assert len(effects(source)) == 5
