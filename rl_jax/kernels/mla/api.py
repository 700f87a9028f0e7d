"""[P] Latent attention: the functions models call."""

from rl_jax.kernels.mla.xla import attend_cached, attend_rows

__all__ = ["attend_cached", "attend_rows"]
