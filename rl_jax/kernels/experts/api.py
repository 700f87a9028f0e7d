"""[P] A mixture of SwiGLU experts, dropless: the function models call.

On a mesh that cuts experts every device takes its own experts' part of the sum, for all tokens of
its group: gathered over `expert` in training, there already where `tensor` cuts experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from rl_jax.arrays import Array, round_up
from rl_jax.kernels.choice import choose
from rl_jax.kernels.experts import triton_launch, xla
from rl_jax.sharding import CONTEXT, EXPERT, ROWS, SHARDS, TENSOR, on_each_device

__all__ = ["backends", "mix"]

BLOCK = 4096
"""Tokens, those of a whole group of devices, that are sorted and multiplied at once; a guess."""

_Operands = tuple[Array, ...]
"""Tokens [T, D], their choices and weights [T, k]."""
Product = Callable[[Any, Array, Array], Array]
"""(rows sorted by group, a matrix for each group, sizes of groups) -> rows times their matrices."""

BACKENDS: dict[str, Product] = {"triton": triton_launch.grouped, "xla": xla.grouped}
"""The best first; xla runs everything everywhere, and multiplies by groups on a TPU alone."""


def backends(dtype: DTypeLike) -> dict[str, str]:
    """Backend -> why it cannot run such operands here, empty where it can; the best first."""
    return {"triton": triton_launch.obstacle(dtype), "xla": ""}


def mix(
    x: Float[Array, "*T D"],
    choices: Int[Array, "*T k"],
    weights: Float[Array, "*T k"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    *,
    block: int = BLOCK,
    backend: str | None = None,
) -> Float[Array, "*T D"]:
    """sum_c weights[.., c] down_e (silu(gate_e x) * up_e x), e = choices[.., c], in x's dtype.

    A token whose choice is -1 goes nowhere for it. Choices that are too large cannot be checked and
    go nowhere either. Differentiable in everything but `choices`. At most `block` tokens are
    multiplied at once, and in a backward pass made again.
    """
    _check(x, choices, weights, gate, up, down, block)
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty or mesh.manual_axes else dict(mesh.shape)
    tokens = PartitionSpec(*(ROWS, CONTEXT)[: x.ndim - 1])
    into, back = _EXPERTS if EXPERT in sizes else _EXPERTS_OVER_TENSOR
    cuts = dict.fromkeys(("x", "choices", "weights"), tokens)
    cuts |= {"gate": into, "up": into, "down": back}
    if backend is None and jax.default_backend() == "tpu":
        backend = "xla"
    product = choose(backend, BACKENDS, backends(x.dtype))
    local = partial(_on_device, product=product, sizes=sizes, block=block)
    run = on_each_device(local, cuts, (tokens,))
    return run(x, choices, weights, gate, up, down)[0]


_EXPERTS = PartitionSpec(EXPERT, SHARDS, TENSOR), PartitionSpec(EXPERT, TENSOR, SHARDS)
_EXPERTS_OVER_TENSOR = PartitionSpec(TENSOR), PartitionSpec(TENSOR)
"""Where (gate and up), down lie: on the trainer's mesh, on the sampler's."""


def _on_device(
    x: Array,
    choices: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    product: Product,
    sizes: dict[str, int],
    block: int,
) -> tuple[Array]:
    """A device's part of tokens [.., D], experts and hidden width; its tokens' whole sums."""
    if any(sizes.get(axis, 1) > 1 for axis in SHARDS) and EXPERT in sizes:
        gate, up = (jax.lax.all_gather(m, SHARDS, axis=1, tiled=True) for m in (gate, up))
        down = jax.lax.all_gather(down, SHARDS, axis=2, tiled=True)
    over, group = (EXPERT if EXPERT in sizes else TENSOR), sizes.get(EXPERT, 1)
    first = jax.lax.axis_index(over) * gate.shape[0] if sizes.get(over, 1) > 1 else 0

    def mixed(tokens: _Operands) -> Array:
        if group > 1:
            tokens = jax.tree.map(lambda a: jax.lax.all_gather(a, EXPERT, tiled=True), tokens)
        x, choices, weights = tokens
        own = jnp.where(choices < 0, -1, choices - first)
        out = xla.mix(x, own, weights, gate, up, down, product)
        if group > 1:
            out = jax.lax.psum_scatter(out, EXPERT, tiled=True)
        return jax.lax.psum(out, TENSOR) if sizes.get(TENSOR, 1) > 1 else out

    flat = tuple(a.reshape(-1, a.shape[-1]) for a in (x, choices, weights))
    return (_by_blocks(mixed, flat, max(block // group, 1)).reshape(x.shape),)


def _by_blocks(mixed: Callable[[_Operands], Array], tokens: _Operands, block: int) -> Array:
    """`mixed` of a few tokens after the other; what one block needs is gone before the next."""
    count = tokens[0].shape[0]
    if count <= block:
        return mixed(tokens)
    blocks = tuple(
        jnp.pad(a, ((0, round_up(count, block) - count), (0, 0)), constant_values=filler).reshape(
            -1, block, a.shape[-1]
        )
        for a, filler in zip(tokens, (0, -1, 0), strict=True)
    )
    _, out = jax.lax.scan(lambda _, own: (None, jax.checkpoint(mixed)(own)), None, blocks)
    return out.reshape(-1, out.shape[-1])[:count]


def _check(
    x: Array, choices: Array, weights: Array, gate: Array, up: Array, down: Array, block: int
) -> None:
    """ValueError naming the argument and what it must be."""
    experts, width, hidden = gate.shape
    if x.shape[-1] != width:
        raise ValueError(f"x: width {x.shape[-1]} must be gate's {width}")
    if choices.shape[:-1] != x.shape[:-1] or 0 in choices.shape:
        raise ValueError(f"choices: shape {choices.shape} must be {x.shape[:-1]} and at least 1")
    if not jnp.issubdtype(choices.dtype, jnp.integer):
        raise ValueError(f"choices: {choices.dtype} must be an integer")
    if weights.shape != choices.shape:
        raise ValueError(f"weights: shape {weights.shape} must be choices' {choices.shape}")
    if up.shape != gate.shape:
        raise ValueError(f"up: shape {up.shape} must be gate's {gate.shape}")
    if down.shape != (experts, hidden, width):
        raise ValueError(f"down: shape {down.shape} must be {(experts, hidden, width)}")
    if block < 1:
        raise ValueError(f"block: {block} must be at least 1")
    for name, matrices in (("gate", gate), ("up", up), ("down", down)):
        if matrices.dtype != x.dtype:
            raise ValueError(f"{name}: {matrices.dtype} must be x's {x.dtype}")
