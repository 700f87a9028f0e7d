"""[P] Latent attention as one softmax over all keys of one sequence, any dtype: the oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array


def attend(
    q: Float[Array, "L H W"], latents: Float[Array, "L W"], *, value_width: int, scale: float
) -> Float[Array, "L H V"]:
    """softmax_j<=i(scale q_i . c_j) c_j[:value_width], every head on the same latents."""
    length = q.shape[0]
    scores = jnp.einsum("lhw,cw->hlc", q, latents) * scale
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("hlc,cv->lhv", jax.nn.softmax(scores, -1), latents[:, :value_width])
