"""[P] Short causal convolution: the functions models call."""

from functools import partial

from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from rl_jax.arrays import Array
from rl_jax.kernels.short_conv import context, xla
from rl_jax.kernels.short_conv.xla import next_tail
from rl_jax.sharding import CONTEXT, ROWS, TENSOR, degree, on_each_device

__all__ = ["next_tail", "short_conv"]


def short_conv(
    x: Float[Array, "R L *ch"],
    weight: Float[Array, "taps *ch"],
    tail: Float[Array, "R before *ch"] | None = None,
    segments: Int[Array, "R L"] | None = None,
    tail_segments: Int[Array, "R before"] | None = None,
) -> Float[Array, "R L *ch"]:
    """silu(sum_d weight[d] x[t - taps + 1 + d]), in x's dtype, added up in float32.

    `tail` holds the taps - 1 inputs before `x`, oldest first (zeros without it); with segments it
    needs segments of its own. Where a mesh cuts the tokens of a row, channels of two axes or more
    end in (heads, width), and there is no tail.
    """
    if degree(CONTEXT) == 1 or tail is not None:
        return xla.short_conv(x, weight, tail, segments, tail_segments)
    xla.check(x, weight, tail, segments, tail_segments)
    channels = x.ndim - 2
    heads = (*(None,) * (channels - 2), TENSOR) if channels > 1 else ()
    tokens = PartitionSpec(ROWS, CONTEXT, *heads)
    cuts = {"x": tokens, "weight": PartitionSpec(None, *heads)}
    if segments is None:
        run = partial(context.short_conv, axis=CONTEXT)
        return on_each_device(lambda *own: (run(*own),), cuts, (tokens,))(x, weight)[0]

    def run_segments(x: Array, weight: Array, segments: Array) -> tuple[Array, ...]:
        return (context.short_conv(x, weight, segments=segments, axis=CONTEXT),)

    cuts["segments"] = PartitionSpec(ROWS, CONTEXT)
    return on_each_device(run_segments, cuts, (tokens,))(x, weight, segments)[0]
