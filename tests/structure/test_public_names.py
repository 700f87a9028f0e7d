"""Names that say something, and a sentence on every public function of a pure file."""

import ast
import re

from tests.structure.source import sources

VAGUE = re.compile(
    r"(Manager|Helpers?|Utils?|Handler)($|[A-Z_])|^(helpers?|utils?|managers?|misc)$"
)


def public_definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    ]


def test_no_vague_names() -> None:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    named = [
        (source.name, node.name)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, kinds)
    ] + [(source.name, source.path.stem) for source in sources()]
    assert not [pair for pair in named if VAGUE.search(pair[1])]


def test_public_functions_of_pure_files_are_documented() -> None:
    bare = [
        f"{source.name}:{node.name}"
        for source in sources()
        if source.mark in ("P", "N")
        for node in public_definitions(source.tree)
        if not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)
