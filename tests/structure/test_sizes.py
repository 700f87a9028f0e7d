"""Size ratchet: files and functions stay small enough to read."""

import ast
import statistics

from tests.structure.source import Source, functions, sources

FILES = {"median": 150, "p90": 350, "cap": 500, "cap in kernels": 700}
FUNCTIONS = {"median": 12, "p90": 45, "cap": 90, "cap in kernels": 150}


def lines_of(source: Source) -> int:
    return source.text.count("\n")


def lines_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def p90(values: list[int]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def too_long(source: Source, lines: int, limits: dict[str, int]) -> bool:
    in_kernels = source.module.startswith("rl_jax.kernels.")
    return lines > limits["cap in kernels" if in_kernels else "cap"]


def test_files() -> None:
    sizes = {source: lines_of(source) for source in sources() if source.has_code}
    assert not [f"{s.name}: {n}" for s, n in sizes.items() if too_long(s, n, FILES)]
    assert statistics.median(sizes.values()) <= FILES["median"]
    assert p90(list(sizes.values())) <= FILES["p90"]


def test_functions() -> None:
    sizes = [(s, f, lines_of_function(f)) for s in sources() for f in functions(s)]
    assert not [f"{s.name}:{f.name}: {n}" for s, f, n in sizes if too_long(s, n, FUNCTIONS)]
    assert statistics.median(n for _, _, n in sizes) <= FUNCTIONS["median"]
    assert p90([n for _, _, n in sizes]) <= FUNCTIONS["p90"]
