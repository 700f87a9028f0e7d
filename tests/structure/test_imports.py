"""Importing does nothing, and pulls no more than a package says."""

import ast
import sys

import pytest

from tests.structure.source import Source, modules_after, sources

QUIET = (
    ast.Import
    | ast.ImportFrom
    | ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Assign
    | ast.AnnAssign
    | ast.TypeAlias
)


def import_all(package: str) -> str:
    names = [s.module for s in sources() if f"{s.module}.".startswith(f"{package}.")]
    return "import " + ", ".join(names)


def top_levels(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)


def is_quiet(node: ast.stmt) -> bool:
    """True where a module-level statement only defines."""
    match node:
        case ast.Assign(targets=targets):
            return all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="defvjp" | "defjvp"))):
            return True
    return isinstance(node, QUIET)


@pytest.mark.parametrize("source", sources(), ids=lambda s: s.name)
def test_module_level_only_defines(source: Source) -> None:
    loud = [f"{source.name}:{node.lineno}" for node in source.tree.body if not is_quiet(node)]
    assert not loud


def test_config_imports_no_jax() -> None:
    pulled = top_levels(modules_after(import_all("rl_jax.config")))
    assert not pulled & {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore"}


def test_losses_import_only_jax_numpy_jaxtyping() -> None:
    # What jax, numpy and jaxtyping may themselves pull, at import or later.
    theirs = top_levels(modules_after("import jax, numpy, jaxtyping, jax.numpy, jax.scipy.special"))
    theirs |= {"jaxlib", "scipy", "ml_dtypes", "opt_einsum", "wadler_lindig"}
    pulled = top_levels(modules_after(import_all("rl_jax.losses")))
    assert pulled <= theirs | {"rl_jax"}, pulled - theirs


def test_import_rl_jax_does_nothing() -> None:
    new = modules_after("import rl_jax") - modules_after("pass")
    assert top_levels(new) == {"rl_jax"}
    assert {name for name in new if name.startswith("rl_jax")} == {"rl_jax"}
