"""The trainer's step on every mesh of five axes that fits eight devices: one device's numbers.

Sizes are powers of two whose product is at most 8: 56 meshes. Twelve run always: all that cut three
axes in two and two that cut one in four. Every two axes are cut at once in some of them, and each
axis with the tokens of a row and without. The others are slow, for each compiles a whole step.

Where tokens of a row are cut a layer takes its heads, or its hidden width, in parts. Here all three
kinds of layers do: latent attention a head at a time, a SwiGLU of four times its width, and delta
attention where a device has more than `HEADS_AT_ONCE`.
"""

from functools import cache
from itertools import combinations, product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from launch import build
from models import llama
from models.kimi_linear import KimiLinearConfig, build_model
from models.layers import kda
from rl_jax.losses import chain, entropy_bonus, recipes
from rl_jax.sharding import (
    CONTEXT,
    DATA,
    EXPERT,
    FSDP,
    ROWS,
    TENSOR,
    TRAINER_AXES,
    known,
    make_trainer_mesh,
)
from rl_jax.trainer.batches import Batch, Shape
from rl_jax.trainer.state import Optimizer, init_state
from rl_jax.trainer.step import make_train_step
from tests.fakes import tiny
from tests.fakes.compiling import QUICK
from tests.trainer.build import batch_of, random_trajectories

MESHES = tuple(sizes for sizes in product((1, 2, 4, 8), repeat=5) if prod(sizes) <= 8)
CUTS: tuple[dict[str, int], ...] = (
    *(dict.fromkeys(axes, 2) for axes in combinations(TRAINER_AXES, 3)),
    {DATA: 2, CONTEXT: 4},
    {EXPERT: 4, CONTEXT: 2},
)
COVER = tuple(tuple(cut.get(axis, 1) for axis in TRAINER_AXES) for cut in CUTS)

VOCAB = 64
LOSS = recipes.dis()
WITH_ENTROPY = LOSS._replace(transform=chain(LOSS.transform, entropy_bonus(0.1)))
SHAPE, LONG = Shape(2, 8, 512), Shape(1, 1, 4096)
LENGTHS = {SHAPE: (500, 90, 64, 60, 400, 30, 512, 128, 127, 65, 300, 200), LONG: (2900, 65, 1000)}
GRADIENTS = Optimizer(
    optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    ),
    lambda step: jnp.float32(0.0),
)
"""Moves nothing, and keeps the gradients where others keep moments."""


@pytest.fixture(autouse=True)
def few_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of eight heads, one of the four that a device has where heads are cut."""
    monkeypatch.setattr(kda, "HEADS_AT_ONCE", 4)


@cache
def model():
    return build_model(
        KimiLinearConfig(
            vocab_size=VOCAB,
            width=16,
            layers=("kda", "mla"),
            feed_forward=("dense", "experts"),
            tied=False,
            heads=8,
            head_dim=4,
            gate_rank=4,
            kv_latent=8,
            kv_shared_key=4,
            rope_theta=10000.0,
            ffn_width=64,
            experts=8,
            chosen_experts=2,
            expert_width=8,
            shared_experts=1,
        )
    )


@cache
def batch(shape: Shape) -> Batch:
    own = random_trajectories(LENGTHS[shape], VOCAB, spread=1.5)
    return batch_of(own, shape, LOSS, [1.0 - 0.3 * i for i in range(len(own))])


@cache
def tied_llama():
    """Each half of its vocabulary is prime, so chunks overlap; two query heads share keys."""
    return llama.build_model(
        llama.LlamaConfig(
            vocab_size=2 * 37, width=16, layers=1, heads=4, kv_heads=2, head_dim=4, ffn_width=16
        )
    )


@cache
def trained(sizes: tuple[int, ...], shape: Shape = SHAPE, policy=model, loss=LOSS):
    """(loss, gradients) of a step, on the host."""
    mesh = make_trainer_mesh(jax.devices(), **dict(zip(TRAINER_AXES, sizes, strict=True)))
    params = tiny.random_params(policy(), 0, mesh)
    state = init_state({"policy": params}, {"policy": GRADIENTS}, {"policy": loss.transform.init()})
    abstract = build.abstract_params(policy(), mesh)
    places = build.state_shardings(jax.eval_shape(lambda: state), abstract, mesh)
    cut = NamedSharding(mesh, known(PartitionSpec(None, ROWS, CONTEXT), mesh))
    given = jax.tree.map(
        lambda x: jax.device_put(x, cut if x.ndim else NamedSharding(mesh, PartitionSpec())),
        batch(shape),
    )
    step = make_train_step(policy(), loss, {"policy": GRADIENTS}, vocab_chunk=32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, out_shardings=(places, None)).lower(
            jax.device_put(state, places), given
        )
    state, report = lowered.compile(QUICK)(jax.device_put(state, places), given)
    return jax.device_get(jax.block_until_ready((report.loss, state.optimizer["policy"])))


def assert_same(got: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    assert float(got[0]) == pytest.approx(float(wanted[0]), rel=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(wanted[1])
    assert len(leaves) == len(jax.tree.leaves(got[1]))
    for (path, one), other in zip(leaves, jax.tree.leaves(got[1]), strict=True):
        apart = np.linalg.norm(np.float64(one) - np.float64(other))
        assert apart <= 1e-5 * np.linalg.norm(np.float64(one)), jax.tree_util.keystr(path)


def test_every_pair_of_axes_is_cut_at_once() -> None:
    cut = [{axis for axis, n in zip(TRAINER_AXES, sizes, strict=True) if n > 1} for sizes in COVER]
    pairs = {pair for axes in cut for pair in combinations(sorted(axes), 2)}
    assert pairs == set(combinations(sorted(TRAINER_AXES), 2))
    for axis in set(TRAINER_AXES) - {CONTEXT}:
        assert {CONTEXT in axes for axes in cut if axis in axes} == {True, False}
    assert len(COVER) == 12 and len(MESHES) == 56 and set(COVER) < set(MESHES)


def test_every_parameter_but_the_bias_has_a_gradient() -> None:
    """Or there would be nothing to compare."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained((1,) * 5)[1]):
        assert np.any(leaf) != ("router_bias" in jax.tree_util.keystr(path)), path


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(s, marks=[] if s in COVER else pytest.mark.slow) for s in MESHES if prod(s) > 1],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_device(sizes) -> None:
    assert_same(trained(sizes), trained((1,) * 5))


@pytest.mark.slow
def test_a_tied_llama_and_entropy_are_those_of_one_device() -> None:
    sizes = tuple(2 if axis in (FSDP, TENSOR, CONTEXT) else 1 for axis in TRAINER_AXES)
    one = trained((1,) * 5, SHAPE, tied_llama, WITH_ENTROPY)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(one[1]))
    assert_same(trained(sizes, SHAPE, tied_llama, WITH_ENTROPY), one)


@pytest.mark.slow
def test_eight_devices_along_one_row_of_4096_tokens() -> None:
    sizes = tuple(8 if axis == CONTEXT else 1 for axis in TRAINER_AXES)
    assert_same(trained(sizes, LONG), trained((1,) * 5, LONG))
