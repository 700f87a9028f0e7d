"""[P] Short causal convolution: the functions models call."""

from rl_jax.kernels.short_conv.xla import next_tail, short_conv

__all__ = ["next_tail", "short_conv"]
