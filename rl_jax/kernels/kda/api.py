"""[P] Kimi delta attention: the functions models call."""

from rl_jax.kernels.kda.xla import bounded_gate, chunked, recurrent_step

__all__ = ["bounded_gate", "chunked", "recurrent_step"]
