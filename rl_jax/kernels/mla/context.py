"""[P] Causal attention of rows that lie in shards along a mesh axis, inside `shard_map`.

Keys, values and segments of all shards are gathered; a device's queries go over them in the order
of one device. Heads with keys of their own go in as many parts as there are shards, so that what is
gathered at once is no larger than a shard of all heads. The transpose of the gather adds the
gradients up and scatters them. A layer keeps its own shard and what attention made of it (`KEPT`);
the backward pass gathers once more.
"""

from collections.abc import Callable
from math import gcd

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from rl_jax.arrays import Array
from rl_jax.kernels.mla import xla
from rl_jax.kernels.mla.online import KEPT


def attend_rows(
    q: Float[Array, "R L H W"],
    latents: Float[Array, "R L W"],
    segments: Int[Array, "R L"],
    *,
    value_width: int,
    scale: float,
    axis: str,
) -> Float[Array, "R L H V"]:
    """`xla.attend_rows` of tokens in contiguous shards of L along `axis`, L a multiple of 64."""

    def attend(q: Array, latents: Array, segments: Array) -> Array:
        return xla.attend_rows(
            q,
            _whole(latents, axis),
            segments,
            value_width=value_width,
            scale=scale,
            first=jax.lax.axis_index(axis) * q.shape[1],
            key_segments=_whole(segments, axis),
        )

    return _gathered_again(attend)(q, latents, segments)


def attend_heads(
    q: Float[Array, "R L H A"],
    k: Float[Array, "R L G A"],
    v: Float[Array, "R L G V"],
    segments: Int[Array, "R L"],
    *,
    scale: float,
    axis: str,
    local: Callable[..., Array] = xla.attend_heads,
) -> Float[Array, "R L H V"]:
    """`local` of tokens in contiguous shards of L along `axis`, L a multiple of 64.

    `local(q, k, v, segments, *, scale, first, key_segments)` as `xla.attend_heads`.
    """

    def attend(q: Array, k: Array, v: Array) -> Array:
        return local(
            q,
            _whole(k, axis),
            _whole(v, axis),
            segments,
            scale=scale,
            first=jax.lax.axis_index(axis) * q.shape[1],
            key_segments=_whole(segments, axis),
        )

    run, parts = _gathered_again(attend), gcd(jax.lax.axis_size(axis), k.shape[2])
    if parts == 1:
        return run(q, k, v)
    operands = tuple(_in_parts(x, parts) for x in (q, k, v))
    out = jax.lax.map(lambda own: run(*own), operands)
    return jnp.moveaxis(out, 0, 2).reshape(*q.shape[:3], v.shape[-1])


def _in_parts(x: Float[Array, "R L H A"], parts: int) -> Float[Array, "P R L h A"]:
    """Heads that lie side by side together."""
    rows, length, heads, width = x.shape
    return jnp.moveaxis(x.reshape(rows, length, parts, heads // parts, width), 2, 0)


def _gathered_again(attend: Callable[..., Array]) -> Callable[..., Array]:
    """`attend` whose backward pass keeps its outputs and logarithms of masses, and no more."""
    return jax.checkpoint(attend, policy=jax.checkpoint_policies.save_only_these_names(KEPT))


def _whole(x: Array, axis: str) -> Array:
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)
