"""[P] Kimi delta attention: the functions models call."""

from rl_jax.kernels.kda.xla import SHORT, bounded_gate, chunked, recurrent

__all__ = ["SHORT", "bounded_gate", "chunked", "recurrent"]
