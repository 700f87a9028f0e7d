"""Cutting a list of layers into repeated units, and running blocks stacked or recomputed."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import stages
from models.execution import Execution, cast
from models.kimi_linear import kimi_linear_48b
from models.layers.parameters import matrix
from models.layers.projection import project
from tests.fakes.compiling import QUICK


def fewest(kinds):
    """Bodies of the best cut, by trying every one."""
    if not kinds:
        return 0
    found = []
    for size, repeats in itertools.product(range(1, len(kinds) + 1), repeat=2):
        unit = kinds[:size]
        if kinds[: size * repeats] == unit * repeats:
            found.append(size + fewest(kinds[size * repeats :]))
    return min(found)


def expanded(cut):
    return tuple(itertools.chain(*(stage.unit * stage.repeats for stage in cut)))


def test_every_short_list_gets_the_fewest_bodies():
    for kinds in itertools.product("ab", repeat=7):
        cut = stages.stages(kinds)
        assert expanded(cut) == kinds
        assert sum(len(stage.unit) for stage in cut) == fewest(kinds)


def test_the_released_model_takes_seven_bodies():
    kinds = kimi_linear_48b().kinds
    cut = stages.stages(kinds)
    assert expanded(cut) == kinds and len(kinds) == 27
    assert [(len(stage.unit), stage.repeats) for stage in cut] == [(1, 1), (4, 6), (2, 1)]
    assert stages.stages(()) == ()


class Block(nnx.Module):
    def __init__(self, kind, rngs):
        hidden = 8 if kind == "a" else 16
        self.up = matrix(rngs, (4, hidden), (None, None), 4)
        self.down = matrix(rngs, (hidden, 4), (None, None), hidden)


KINDS = ("a", "b", "b", "b", "a", "b", "a", "b")
INPUTS = [jnp.full((3,), float(i)) if kind == "b" else None for i, kind in enumerate(KINDS)]
"""A layer's own input goes to layers of one kind alone."""


def body(block, x, own, seen=None):
    if seen is not None:
        seen.append(block)
    made = x + project(jnp.tanh(project(x, block.up[...])), block.down[...])
    return (made, None) if own is None else (made + own[:, None], jnp.sum(made, -1) + own)


def through(states, x, execution, seen=None):
    blocks = [nnx.merge(graph, state) for (graph, _), state in zip(SPLIT, states, strict=True)]
    return stages.run(partial(body, seen=seen), blocks, KINDS, x, INPUTS, execution)


def numbers(leaf):
    return RANDOM.normal(0, leaf.shape[0] ** -0.5, leaf.shape).astype(np.float32)


def split(kind):
    return nnx.split(nnx.eval_shape(lambda: Block(kind, nnx.Rngs(0))))


RANDOM = np.random.default_rng(0)
SPLIT = [split(kind) for kind in KINDS]
STATES = [jax.tree.map(numbers, nnx.to_pure_dict(state)) for _, state in SPLIT]
X = jnp.asarray(RANDOM.standard_normal((3, 4)), jnp.float32)


def loss(states, x, execution):
    out, others = through(states, x, execution)
    return jnp.sum(out**2) + sum(jnp.sum(o) for o in others if o is not None), others


sloped = jax.jit(
    jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2, compiler_options=QUICK
)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", ["none", "block", "dots"])
def test_every_execution_gives_the_same(scan, remat):
    """Values, each layer's own output at its place, gradients of all parameters."""
    (want, outs), slopes = sloped(STATES, X, Execution())
    (got, own), own_slopes = sloped(STATES, X, Execution(scan, remat))
    assert [o is None for o in own] == [kind == "a" for kind in KINDS]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (own, own_slopes), (outs, slopes))


def test_a_scan_traces_each_body_once():
    seen = []
    jax.eval_shape(lambda s: through(s, X, Execution(scan=True), seen)[0], STATES)
    assert len(seen) == sum(len(stage.unit) for stage in stages.stages(KINDS)) == 4
    seen.clear()
    jax.eval_shape(lambda s: through(s, X, Execution(), seen)[0], STATES)
    assert len(seen) == len(KINDS)


def test_recomputation_follows_the_choice():
    """Products with weights: 2 forward and 4 backward a layer; "block" repeats the forward ones
    that gradients need, "dots" keeps all of them but tanh."""

    def counts(execution):
        slope = jax.grad(lambda s: loss(s, X, execution)[0])
        text = str(jax.make_jaxpr(slope)(STATES))
        return text.count("dot_general["), text.count(" tanh ")

    plain, block, dots = (counts(Execution(remat=r)) for r in ("none", "block", "dots"))
    assert plain == (6 * len(KINDS), len(KINDS))
    assert block[0] > plain[0] and block[1] == 2 * plain[1]
    assert dots[0] == plain[0] and dots[1] == 2 * plain[1]


def test_a_cast_leaves_exact_parameters_alone():
    params, exact = {"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": True, "b": False}
    got = cast(params, exact, Execution(compute="bfloat16"))
    assert [str(x.dtype) for x in jax.tree.leaves(got)] == ["float32", "bfloat16"]
    assert cast(params, exact, Execution()) is params


@pytest.mark.parametrize("change", [{"remat": "all"}, {"compute": "float16"}])
def test_a_wrong_execution_is_named(change):
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: .* must be one of"):
        Execution(**change)
