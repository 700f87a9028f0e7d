"""[P] Kimi delta attention of rows that lie in shards along a mesh axis, inside `shard_map`.

A shard is an affine map of the state that enters it, S -> M S + B with M [K, K], and so is each of
its outputs. One run of the kernel gives both: the identity rides along as K more columns of the
state, whose values are zero. One gather of (M, B) then gives every device what enters its shard.
Past a reset the map is not multiplied at all, for 0 x NaN would take one sequence into the next.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda.checks import check_operands, check_state, exact


def chunked(
    local: Callable[..., tuple[Array, ...]],
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H K"],
    beta: Float[Array, "R L H"],
    state: Float[Array, "R H K V"] | None = None,
    reset: Bool[Array, "R N"] | None = None,
    *,
    axis: str,
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"]]:
    """`local` of tokens in contiguous shards of L along `axis`, L a multiple of 64.

    `local(q, k, v, g, beta, state, reset) -> (out, final)` is `api.chunked` of some options, for
    values of any width; it gets V + K columns.
    `state` enters the first shard and is the same on all devices, as is the final state of the
    last that comes back; a gradient taken inside `shard_map` counts that state once per device.
    Every mesh axis must be manual where `local` runs a kernel of Pallas or Triton.
    """
    shape = _state_shape(q, k, v, g, beta, state)
    if jax.lax.axis_size(axis) == 1:
        out, final = local(q, k, v, g, beta, state, reset)
        return out, final
    if state is None:
        state = jnp.zeros(shape, g.dtype)
    rows, _, width, _ = shape
    identity = jnp.broadcast_to(jnp.eye(width, dtype=g.dtype), (*shape[:3], width))
    out, shard = local(
        q,
        k,
        jnp.concatenate([v, jnp.zeros_like(k)], -1),
        g,
        beta,
        jnp.concatenate([jnp.zeros_like(state), identity], -1),
        reset,
    )
    if reset is None:
        reset = jnp.zeros((rows, q.shape[1] // CHUNK), bool)
    entering, final = _folded(shard, jnp.any(reset, 1), state, axis)
    out, of_state = jnp.split(out, [v.shape[-1]], -1)
    restarted = jnp.repeat(jax.lax.cummax(reset.astype(jnp.int32), 1) > 0, CHUNK, 1)
    carried = _mapped("rlhk,rhkv->rlhv", of_state.astype(g.dtype), entering, restarted)
    return (out.astype(g.dtype) + carried).astype(v.dtype), final


def _state_shape(q, k, v, g, beta, state: Array | None) -> tuple[int, ...]:
    """The shape of a state, once the operands are what `api.chunked` takes."""
    check_operands(q, k, v, g, beta)
    shape = (q.shape[0], *q.shape[2:], v.shape[-1])
    if state is not None:
        check_state(state, shape, exact(q))
    return shape


def _mapped(equation: str, linear: Array, state: Array, restarted: Array) -> Array:
    """`linear` of the state; zero, whatever either holds, where a reset lies between.

    Masked before and after: the product's slopes are 0 x NaN there too.
    """
    off = restarted.reshape(*restarted.shape, *(1,) * (4 - restarted.ndim))
    product = jnp.einsum(equation, jnp.where(off, 0.0, linear), state, precision="highest")
    return jnp.where(off, 0.0, product)


def _folded(
    shard: Float[Array, "R H K W"], restarted: Bool[Array, " R"], state: Array, axis: str
) -> tuple[Array, Array]:
    """The states that enter this device's shard and that leave the last one."""
    rows = shard.shape[0]
    packed = [shard.reshape(rows, -1), restarted[:, None].astype(shard.dtype)]
    shards = jax.lax.all_gather(jnp.concatenate(packed, 1), axis)

    def step(state, packed):
        whole = packed[:, :-1].reshape(shard.shape)
        added, transition = jnp.split(whole, [state.shape[-1]], -1)
        return added + _mapped("rhij,rhjv->rhiv", transition, state, packed[:, -1] > 0), state

    final, entering = jax.lax.scan(step, state, shards)
    return entering[jax.lax.axis_index(axis)], final
