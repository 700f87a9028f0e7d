"""[P] Attention as one softmax over all keys of one sequence, any dtype: the oracle."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_jax.arrays import Array


def attend(
    q: Float[Array, "L H W"], latents: Float[Array, "L W"], *, value_width: int, scale: float
) -> Float[Array, "L H V"]:
    """softmax_j<=i(scale q_i . c_j) c_j[:value_width], every head on the same latents."""
    keys = jnp.broadcast_to(latents[:, None], q.shape)
    return attend_heads(q, keys, keys[..., :value_width], scale=scale)


def attend_heads(
    q: Float[Array, "L H A"], k: Float[Array, "L H A"], v: Float[Array, "L H V"], *, scale: float
) -> Float[Array, "L H V"]:
    """softmax_j<=i(scale q_i . k_j) v_j, each head on keys and values of its own."""
    length = q.shape[0]
    scores = jnp.einsum("lha,cha->hlc", q, k) * scale
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    return jnp.einsum("hlc,chv->lhv", jax.nn.softmax(scores, -1), v)
