"""[N] Slopes against finite differences of a reference in numpy."""

from collections.abc import Callable

import jax
import numpy as np

from rl_jax.arrays import Tree


def assert_slopes(
    value: Callable[[Tree], float], at: Tree, slopes: Tree, rtol: float, atol: float
) -> None:
    """Along a random direction of every leaf, a step of 1e-5 there and back; all in float64."""
    leaves, structure = jax.tree.flatten(at)
    told, random = jax.tree_util.tree_leaves_with_path(slopes), np.random.default_rng(0)
    for i, (leaf, (path, slope)) in enumerate(zip(leaves, told, strict=True)):
        step = random.standard_normal(leaf.shape)
        step *= 1e-5 / np.linalg.norm(step)
        up, down = (
            value(jax.tree.unflatten(structure, [*leaves[:i], end, *leaves[i + 1 :]]))
            for end in (leaf + step, leaf - step)
        )
        np.testing.assert_allclose(
            np.sum(slope * step), (up - down) / 2, rtol, atol, err_msg=jax.tree_util.keystr(path)
        )
