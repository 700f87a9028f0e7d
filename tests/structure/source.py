"""The repository as data for the tests of its structure: files, syntax trees, imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rl_jax", "models", "launch")


@dataclass(frozen=True)
class Source:
    """One Python file of our packages."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    @property
    def has_code(self) -> bool:
        return any(not is_docstring(node) for node in self.tree.body)

    @property
    def mark(self) -> str:
        """`P`, `N` or `H`; empty where the docstring begins with no mark."""
        head = self.docstring[:3]
        return head[1] if head in ("[P]", "[N]", "[H]") else ""


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of rl_jax, models and launch."""
    found = []
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        found.append(Source(path, module, text, ast.parse(text, str(path))))
    return tuple(found)


def imported_modules(source: Source, ours: frozenset[str]) -> Iterator[str]:
    """Absolute names of what `source` imports, anywhere in it.

    `from a import b` names `a.b` where that is one of our modules (`ours`), else `a`.
    """
    is_package = source.path.name == "__init__.py"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = source.module.split(".")
                up = up[: len(up) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in ours else base


def our_modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def committed_files() -> list[Path]:
    """What git holds or would take; without a git repository, every file outside hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
    )
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        skipped = {".venv", ".tools", ".git", "runs", "__pycache__"}
        paths = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code + "\nimport sys; print('\\n'.join(sys.modules))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
