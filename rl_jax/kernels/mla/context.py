"""[P] Causal attention of rows that lie in shards along a mesh axis, inside `shard_map`.

Keys, values and segments of all shards are gathered; a device's queries go over them in the order
of one device. The transpose of the gather adds the gradients up and scatters them. The backward
pass gathers once more, so a layer keeps its own shard alone.
"""

from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jaxtyping import Float, Int

from rl_jax.arrays import Array
from rl_jax.kernels.mla import xla


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
    k: Float[Array, "R L H A"],
    v: Float[Array, "R L H V"],
    segments: Int[Array, "R L"],
    *,
    scale: float,
    axis: str,
) -> Float[Array, "R L H V"]:
    """`xla.attend_heads` of tokens in contiguous shards of L along `axis`, L a multiple of 64."""

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        return xla.attend_heads(
            q,
            _whole(k, axis),
            _whole(v, axis),
            segments,
            scale=scale,
            first=jax.lax.axis_index(axis) * q.shape[1],
            key_segments=_whole(segments, axis),
        )

    return _gathered_again(attend)(q, k, v, segments)


def _gathered_again(attend: Callable[..., Array]) -> Callable[..., Array]:
    """`attend` whose backward pass keeps no gathered row, nor the values cut from one."""

    def kept(primitive: Primitive, *_: object, **__: object) -> bool:
        return primitive.name not in ("all_gather", "slice")

    return jax.checkpoint(attend, policy=kept)


def _whole(x: Array, axis: str) -> Array:
    return jax.lax.all_gather(x, axis, axis=1, tiled=True)
