"""A file of rl_jax imports only lower levels; on its own level only a base.py or types.py."""

import ast
from pathlib import Path

import pytest

from tests.structure.source import PACKAGES, Source, imported_modules, our_modules, sources

# Longest prefix wins. Two numbers: the level of the pure files [P] [N], and of the files with
# host effects [H].
LEVELS = {
    "rl_jax": (4, 4),
    "rl_jax.arrays": (0, 0),
    "rl_jax.masking": (0, 0),
    "rl_jax.rng": (0, 0),
    "rl_jax.config": (0, 0),
    "rl_jax.kernels": (1, 1),
    "rl_jax.metrics": (1, 3),
    "rl_jax.trajectories": (1, 1),
    "rl_jax.staleness": (1, 1),
    "rl_jax.model": (1, 1),
    "rl_jax.precision": (2, 2),
    "rl_jax.sharding": (0, 0),
    "rl_jax.losses": (2, 2),
    "rl_jax.advantages": (2, 2),
    "rl_jax.trainer": (3, 4),
    "rl_jax.sampler": (2, 4),
    "rl_jax.orchestrator": (2, 4),
    "rl_jax.snapshots": (2, 3),
    "rl_jax.wire": (1, 2),
    "rl_jax.dispatch": (3, 3),
    "rl_jax.queues": (2, 3),
    "rl_jax.sandboxes": (2, 3),
    "rl_jax.tasks": (2, 3),
    "rl_jax.gateway": (2, 3),
    "rl_jax.replay": (4, 4),
}
SHARED = {"base", "types", "protocol", "arrays"}
"""Last names of modules that files of their own level may import."""

BY_MODULE = {source.module: source for source in sources()}


def prefix(module: str) -> str:
    """The longest key of LEVELS that `module` is in."""
    return max((key for key in LEVELS if module == key or module.startswith(key + ".")), key=len)


def level(source: Source) -> int:
    pure, effects = LEVELS[prefix(source.module)]
    return effects if source.mark == "H" else pure


def fault(source: Source, imported: Source) -> str:
    """Why `source` may not import `imported`; empty where it may."""
    own, other = prefix(source.module), prefix(imported.module)
    if own == other:
        return ""
    above = level(imported) - level(source)
    if above < 0 or (above == 0 and imported.module.rsplit(".", 1)[-1] in SHARED):
        return ""
    return f"{source.name} (level {level(source)}) imports {imported.name} ({level(imported)})"


def test_every_module_of_rl_jax_has_a_level() -> None:
    inside = [module for module in BY_MODULE if module.startswith("rl_jax.")]
    assert not [module for module in inside if prefix(module) == "rl_jax"]


def test_rl_jax_imports_only_lower_levels() -> None:
    ours = our_modules()
    faults = {
        fault(source, BY_MODULE[name])
        for source in sources()
        if source.module.startswith("rl_jax.")
        for name in imported_modules(source, ours)
        if name.startswith("rl_jax.") and name in ours
    }
    assert not faults - {""}, "\n".join(sorted(faults - {""}))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_the_ones_below(package: str) -> None:
    above = set(PACKAGES[PACKAGES.index(package) + 1 :])
    faults = [
        f"{source.name} imports {name}"
        for source in sources()
        if source.module.split(".")[0] == package
        for name in imported_modules(source, our_modules())
        if name.split(".")[0] in above
    ]
    assert not faults, "\n".join(faults)


def test_a_fault_is_found() -> None:
    """The rules themselves: up, sideways, and what is allowed."""

    def made(module: str, mark: str = "P") -> Source:
        text = f'"""[{mark}] x"""\n'
        return Source(Path(__file__), module, text, ast.parse(text))

    step, loop = made("rl_jax.trainer.step"), made("rl_jax.trainer.loop", "H")
    assert fault(step, made("rl_jax.queues.memory", "H"))
    assert fault(step, made("rl_jax.dispatch", "H"))
    assert fault(made("rl_jax.losses.evaluate"), made("rl_jax.advantages"))
    assert fault(loop, made("rl_jax.sampler.engine", "H"))
    assert not fault(step, made("rl_jax.losses.types"))
    assert not fault(step, made("rl_jax.queues.base", "N"))
    assert not fault(loop, made("rl_jax.queues.memory", "H"))
    assert not fault(loop, step)
