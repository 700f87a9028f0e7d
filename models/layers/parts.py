"""[P] A layer's heads or hidden width, a part after the other, where a device's tokens are many.

Where a mesh cuts the tokens of a row, what a layer makes of its tokens is what fills a device.
Parts are of weights: a scan over tokens would cut what the mesh has cut.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from rl_jax.arrays import Array
from rl_jax.kernels.mla.online import KEPT
from rl_jax.sharding import CONTEXT, TENSOR, degree


def parts(count: int, most: int) -> int:
    """Into how many equal parts `count` heads or numbers go, so that a device has `most` at once.

    1 where no mesh cuts the tokens of a row.
    """
    return _fewest(count // degree(TENSOR), most) if degree(CONTEXT) > 1 else 1


def summed[M: nnx.Module](
    module: M, axis: str, count: int, run: Callable[[M, Array], Array], x: Array, kept: int = 0
) -> Array:
    """The sum over `count` parts of `run(part, x)`, in x's shape and dtype.

    A part has every `count`-th of what `axis` names, so that each device of `tensor` takes part in
    all. Parts are added up in float32, and so are the slopes of x. A backward pass makes a part
    again, but for what attention keeps, `kept` numbers a token and part: these are stacked, but not
    in an array that is larger than x.
    """
    if count == 1:
        return run(module, x)
    graph, state = nnx.split(module)
    variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    names = [variable.get_metadata("axes") for variable in variables]
    leaves, structure = jax.tree.flatten(state)
    cut = {i: _apart(leaves[i], n.index(axis), count) for i, n in enumerate(names) if axis in n}

    exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def add(total: Array, own: dict[int, Array]) -> tuple[Array, None]:
        part = [own.get(i, leaf) for i, leaf in enumerate(leaves)]
        return total + run(nnx.merge(graph, structure.unflatten(part)), exact.astype(x.dtype)), None

    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    one = jax.checkpoint(add, prevent_cse=False, policy=policy)
    total, scans = jnp.zeros_like(exact), _fewest(count, x.shape[-1] // kept if kept else count)
    for first in range(0, count, count // scans):
        own = {i: leaf[first : first + count // scans] for i, leaf in cut.items()}
        total, _ = jax.lax.scan(one, total, own)
    return total.astype(x.dtype)


def _fewest(count: int, most: int) -> int:
    """The fewest equal parts of `count` that hold at most `most`, at least 1."""
    most = max(most, 1)
    return next(n for n in range(1, count + 1) if count % n == 0 and count // n <= most)


def _apart(leaf: Array, axis: int, count: int) -> Array:
    """[.., H, ..] -> [count, .., H / count, ..]: entry i is of part i mod count."""
    before, size, after = leaf.shape[:axis], leaf.shape[axis] // count, leaf.shape[axis + 1 :]
    shape = *before, size, count, *after
    return jnp.moveaxis(leaf.reshape(shape), axis + 1, 0)
