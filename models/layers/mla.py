"""[P] Multi-head latent attention without positions (NoPE).

Keys and values of all heads come from one normed latent per token plus a key part that heads share;
the up-projections are absorbed into queries and outputs, in training as against the cache.
Equations: arXiv 2405.04434, sec. 2.1; arXiv 2510.26692 for leaving positions out.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from models.layers.context import Rows, Step
from models.layers.norm import RMSNorm
from models.layers.parameters import matrix
from rl_jax.arrays import Array
from rl_jax.kernels.mla import api as mla
from rl_jax.model import TokenCache


class LatentAttention(nnx.Module):
    """One MLA layer; a head's key is `head_dim` numbers of its own and `shared_key` shared ones."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        latent: int,
        shared_key: int,
        eps: float,
        out_gain: float,
        rngs: nnx.Rngs,
    ):
        per_head = ("heads", None)
        key_width = head_dim + shared_key
        self.query = matrix(rngs, (width, heads, key_width), ("embed", *per_head), width)
        self.down = matrix(rngs, (width, latent + shared_key), ("embed", "latent"), width)
        self.norm = RMSNorm(latent, eps)
        self.key_up = matrix(rngs, (latent, heads, head_dim), (None, *per_head), latent)
        self.value_up = matrix(rngs, (latent, heads, head_dim), (None, *per_head), latent)
        self.out = matrix(
            rngs, (heads, head_dim, width), (*per_head, "embed"), heads * head_dim, out_gain
        )
        self.latent, self.head_dim, self.scale = latent, head_dim, key_width**-0.5

    @staticmethod
    def cache(latent: int, shared_key: int) -> TokenCache:
        """What a sequence keeps of this layer: normed latent | shared key."""
        return TokenCache(latent + shared_key)

    def forward(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        out = mla.attend_rows(
            self._queries(x),
            self._entries(x),
            rows.segments,
            value_width=self.latent,
            scale=self.scale,
        )
        return self._finish(out)

    def extend(
        self, x: Float[Array, "R n D"], step: Step, pool: Array, layer: int
    ) -> tuple[Float[Array, "R n D"], Array]:
        entries = self._entries(x)[:, : step.width]
        pool = step.io.write_tokens(
            pool, step.pages, layer, step.positions, step.n_valid, entries
        )
        out = mla.attend_cached(
            self._queries(x),
            step.io.read_tokens(pool, step.pages, layer),
            step.positions,
            step.n_valid,
            value_width=self.latent,
            scale=self.scale,
        )
        return self._finish(out), pool

    def _entries(self, x: Array) -> Float[Array, "R L W"]:
        down = jnp.dot(x, self.down[...])
        return jnp.concatenate([self.norm(down[..., : self.latent]), down[..., self.latent :]], -1)

    def _queries(self, x: Array) -> Float[Array, "R L H W"]:
        q = jnp.einsum("rld,dhk->rlhk", x, self.query[...])
        absorbed = jnp.einsum("rlhk,chk->rlhc", q[..., : self.head_dim], self.key_up[...])
        return jnp.concatenate([absorbed, q[..., self.head_dim :]], -1)

    def _finish(self, out: Float[Array, "R L H C"]) -> Float[Array, "R L D"]:
        values = jnp.einsum("rlhc,chv->rlhv", out, self.value_up[...])
        return jnp.einsum("rlhv,hvd->rld", values, self.out[...])
