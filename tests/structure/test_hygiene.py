"""What no file may hold: bare excepts, pickle, bare suppressions, registry hosts, stale pins."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.structure.source import (
    ROOT,
    Source,
    committed_files,
    imported_modules,
    our_modules,
    sources,
)

UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
SUPPRESSION = re.compile(r"#\s*(type:\s*ignore|pyright:\s*ignore)(.*)")
EXPLAINED = re.compile(r"\[[\w, -]+\]\W*\w+")
SUPPRESSIONS = 2
"""How many suppressions of the type checker our packages hold; lower it when one goes."""

# In pieces, so that this file does not match itself.
HOSTS = re.compile(
    "|".join(["py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.", "deb" + r"ian\.org/"])
)
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
LOCK = ROOT / ".requirements.lock"


def test_no_bare_except() -> None:
    bare = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


@pytest.mark.parametrize("source", sources(), ids=lambda s: s.name)
def test_no_pickle(source: Source) -> None:
    assert not UNSAFE & {name.split(".")[0] for name in imported_modules(source, our_modules())}


def test_suppressions_are_few_and_explained() -> None:
    found = [(s.name, hit) for s in sources() for hit in SUPPRESSION.finditer(s.text)]
    assert not [(name, hit[0]) for name, hit in found if not EXPLAINED.match(hit[2])]
    assert len(found) <= SUPPRESSIONS, [(name, hit[0]) for name, hit in found]


def test_no_file_names_a_package_registry() -> None:
    named = []
    for path in committed_files():
        hit = HOSTS.search(path.read_bytes().decode("utf-8", errors="replace"))
        if hit:
            named.append(f"{path.relative_to(ROOT)}: {hit[0]}")
    assert not named


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_first_line_of_a_config_is_the_command_that_runs_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    commands = f"# make {path.stem}", f"# rl-jax run configs/{path.name}"
    assert first.startswith(commands), first


def test_lock_satisfies_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["report"] + extras["dev"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))
    for text in wanted:
        requirement = Requirement(text)
        version = pinned.get(requirement.name.lower())
        assert version and version in requirement.specifier, f"{text}: `make lock` is due"


def test_lock_pins_by_hash() -> None:
    entries = re.split(r"\n(?=\S)", LOCK.read_text().strip())
    assert all(" \\\n    --hash=sha256:" in entry for entry in entries)
