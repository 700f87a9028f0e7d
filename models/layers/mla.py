"""[P] Multi-head latent attention without positions (NoPE).

Keys and values of all heads come from one normed latent per token plus a key part that heads share;
the up-projections are absorbed into queries and outputs: always against the cache, and in training
where heads are no narrower than latents.
Equations: arXiv 2405.04434, sec. 2.1; arXiv 2510.26692 for leaving positions out.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from models.layers.context import Rows, Step
from models.layers.norm import RMSNorm
from models.layers.parameters import matrix
from models.layers.projection import project
from rl_jax.arrays import Array, Tree
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
        up = ("heads", None, None)
        self.key_up = matrix(rngs, (heads, head_dim, latent), up, latent)
        self.value_up = matrix(rngs, (heads, latent, head_dim), up, latent)
        self.out = matrix(
            rngs, (heads, head_dim, width), (*per_head, "embed"), heads * head_dim, out_gain
        )
        self.latent, self.head_dim, self.scale = latent, head_dim, key_width**-0.5

    @staticmethod
    def cache(latent: int, shared_key: int) -> TokenCache:
        """What a sequence keeps of this layer: normed latent | shared key."""
        return TokenCache(latent + shared_key)

    def forward(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        if self.head_dim < self.latent:
            return self._expanded(x, rows)
        out = mla.attend_rows(
            self._queries(x),
            self._entries(x),
            rows.segments,
            value_width=self.latent,
            scale=self.scale,
        )
        return self._finish(out)

    def _expanded(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        """Each head's own keys and values.

        A pair of tokens takes 2 head_dim + shared_key products per head, absorbed
        2 latent + shared_key; what comes before and after takes the same.
        """
        entries = self._entries(x)
        latents, shared = entries[..., : self.latent], entries[..., None, self.latent :]
        keys = project(latents, self.key_up[...].transpose(2, 0, 1))
        shared = jnp.broadcast_to(shared, (*keys.shape[:3], shared.shape[-1]))
        values = project(latents, self.value_up[...].swapaxes(0, 1))
        keys = jnp.concatenate([keys, shared], -1)
        queries = project(x, self.query[...])
        out = mla.attend_heads(queries, keys, values, rows.segments, scale=self.scale)
        return project(out, self.out[...], 2)

    def extend(
        self, x: Float[Array, "R n D"], step: Step, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree]:
        entries = self._entries(x)[:, : step.width]
        pool = step.io.write_tokens(pool, step.pages, layer, step.positions, step.n_valid, entries)
        queries, place = self._queries(x), (step.positions, step.n_valid)
        out = step.io.attend(pool, step.pages, layer, queries, *place, self.latent, self.scale)
        return self._finish(out), pool

    def _entries(self, x: Array) -> Float[Array, "R L W"]:
        down = project(x, self.down[...])
        return jnp.concatenate([self.norm(down[..., : self.latent]), down[..., self.latent :]], -1)

    def _queries(self, x: Array) -> Float[Array, "R L H W"]:
        q = project(x, self.query[...])
        absorbed = _per_head(q[..., : self.head_dim], self.key_up[...])
        return jnp.concatenate([absorbed, q[..., self.head_dim :]], -1)

    def _finish(self, out: Float[Array, "R L H C"]) -> Float[Array, "R L D"]:
        values = _per_head(out, self.value_up[...])
        return project(values, self.out[...], 2)


def _per_head(x: Float[Array, "R L H A"], weight: Float[Array, "H A B"]) -> Float[Array, "R L H B"]:
    """Each head through its own matrix.

    Sequences take one product per row and head: with rows merged, the bits of XLA's CPU product
    depend on their number. Single tokens are merged, for a copy of the weights per row costs more.
    """
    if x.shape[1] == 1:
        return jnp.einsum("rlha,hab->rlhb", x, weight)
    weight = jnp.broadcast_to(weight, (x.shape[0], *weight.shape))
    return jnp.einsum("rhla,rhab->rhlb", x.swapaxes(1, 2), weight).swapaxes(1, 2)
