"""[P] Multi-head latent attention, with rotary positions or without (NoPE).

Keys and values of all heads come from one normed latent per token plus a key part that heads share;
the up-projections are absorbed into queries and outputs: always against the cache, and in training
where heads are no narrower than latents. Positions rotate the shared part alone, pairs of
neighbours, and what is cached is rotated; without them its numbers stay as they are.
Equations: arXiv 2405.04434, sec. 2.1; arXiv 2510.26692 for leaving positions out.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from models.layers.context import Rows, Step
from models.layers.norm import RMSNorm, exact
from models.layers.parameters import matrix
from models.layers.parts import parts, summed
from models.layers.projection import project
from rl_jax.arrays import Array, Tree
from rl_jax.kernels.mla import api as mla
from rl_jax.model import TokenCache


class LatentAttention(nnx.Module):
    """One MLA layer; a head's key is `head_dim` numbers of its own and `shared_key` shared ones.

    `value_dim` None is `head_dim`, `query_latent` None a full projection, `rope_theta` None is
    without positions.
    """

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
        value_dim: int | None = None,
        query_latent: int | None = None,
        rope_theta: float | None = None,
    ):
        per_head = ("heads", None)
        value_dim = head_dim if value_dim is None else value_dim
        key_width = head_dim + shared_key
        if query_latent is not None:
            self.query_down = matrix(rngs, (width, query_latent), ("embed", "latent"), width)
            self.query_norm = RMSNorm(query_latent, eps)
        fan_in, axis = (width, "embed") if query_latent is None else (query_latent, "latent")
        self.query = matrix(rngs, (fan_in, heads, key_width), (axis, *per_head), fan_in)
        self.down = matrix(rngs, (width, latent + shared_key), ("embed", "latent"), width)
        self.norm = RMSNorm(latent, eps)
        up = ("heads", None, None)
        self.key_up = matrix(rngs, (heads, head_dim, latent), up, latent)
        self.value_up = matrix(rngs, (heads, latent, value_dim), up, latent)
        self.out = matrix(
            rngs, (heads, value_dim, width), (*per_head, "embed"), heads * value_dim, out_gain
        )
        self.latent, self.head_dim, self.scale = latent, head_dim, key_width**-0.5
        self.expanded = head_dim + value_dim < 2 * latent
        self.low_rank, self.rope_theta = query_latent is not None, rope_theta

    @staticmethod
    def cache(latent: int, shared_key: int) -> TokenCache:
        """What a sequence keeps of this layer: normed latent | shared key."""
        return TokenCache(latent + shared_key)

    def forward(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        if self.expanded:
            return self._expanded(x, rows)
        out = mla.attend_rows(
            self._absorbed(x, rows.positions),
            self._entries(x, rows.positions),
            rows.segments,
            value_width=self.latent,
            scale=self.scale,
        )
        return self._finish(out)

    def _expanded(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        """Each head's own keys and values; where tokens are many, a head after the other.

        A pair of tokens takes head_dim + shared_key + value_dim products per head, absorbed
        2 latent + shared_key; what comes before and after takes the same.
        """
        entries = self._entries(x, rows.positions)
        count = parts(self.key_up[...].shape[0], 1)
        kept = self.value_up[...].shape[-1]
        return summed(self, "heads", count, lambda own, x: own._heads(x, entries, rows), x, kept)

    def _heads(
        self, x: Float[Array, "R L D"], entries: Float[Array, "R L W"], rows: Rows
    ) -> Float[Array, "R L D"]:
        latents, shared = entries[..., : self.latent], entries[..., None, self.latent :]
        keys = project(latents, self.key_up[...].transpose(2, 0, 1))
        shared = jnp.broadcast_to(shared, (*keys.shape[:3], shared.shape[-1]))
        values = project(latents, self.value_up[...].swapaxes(0, 1))
        keys = jnp.concatenate([keys, shared], -1)
        queries = self._queries(x, rows.positions)
        out = mla.attend_heads(queries, keys, values, rows.segments, scale=self.scale)
        return project(out, self.out[...], 2)

    def extend(
        self, x: Float[Array, "R n D"], step: Step, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree]:
        """The cache is in float32, and so is attention to it."""
        places = step.places(x.shape[1]) if self.rope_theta else None
        kept = exact(self._entries(x, places)[:, : step.width, None])
        pool = step.io.write_tokens(pool, step.pages, layer, step.positions, step.n_valid, kept)
        queries, place = exact(self._absorbed(x, places)), (step.positions, step.n_valid)
        out = step.io.attend(pool, step.pages, layer, queries, *place, self.latent, self.scale)
        return self._finish(out.astype(x.dtype)), pool

    def _entries(self, x: Array, places: Array | None) -> Float[Array, "R L W"]:
        down = project(x, self.down[...])
        latents = self.norm(down[..., : self.latent])
        return jnp.concatenate([latents, self._placed(down[..., self.latent :], places)], -1)

    def _queries(self, x: Array, places: Array | None) -> Float[Array, "R L H A"]:
        """With a part of every head's own, then the part that meets the shared key."""
        if self.low_rank:
            x = self.query_norm(project(x, self.query_down[...]))
        q = project(x, self.query[...])
        if self.rope_theta is None:
            return q
        own, shared = q[..., : self.head_dim], q[..., self.head_dim :]
        return jnp.concatenate([own, self._placed(shared, places)], -1)

    def _absorbed(self, x: Array, places: Array | None) -> Float[Array, "R L H W"]:
        q = self._queries(x, places)
        absorbed = _per_head(q[..., : self.head_dim], self.key_up[...])
        return jnp.concatenate([absorbed, q[..., self.head_dim :]], -1)

    def _placed(self, x: Float[Array, "R L *H P"], places: Array | None) -> Array:
        if self.rope_theta is None:
            return x
        if places is None:
            raise ValueError("positions: must be given to a layer with rotary positions")
        return _rotated(x, places, self.rope_theta)

    def _finish(self, out: Float[Array, "R L H C"]) -> Float[Array, "R L D"]:
        values = _per_head(out, self.value_up[...])
        return project(values, self.out[...], 2)


def _rotated(
    x: Float[Array, "R L *H P"], places: Int[Array, "R L"], theta: float
) -> Float[Array, "R L *H P"]:
    """Numbers 2i and 2i + 1 turned by position * theta^(-2i / P) (arXiv 2104.09864, eq. 15)."""
    width, full = x.shape[-1], exact(x)
    speeds = theta ** (-jnp.arange(0, width, 2, dtype=full.dtype) / width)
    angles = places.reshape(*places.shape, *(1,) * (x.ndim - 2)).astype(full.dtype) * speeds
    cos, sin, even, odd = jnp.cos(angles), jnp.sin(angles), full[..., 0::2], full[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)


def _per_head(x: Float[Array, "R L H A"], weight: Float[Array, "H A B"]) -> Float[Array, "R L H B"]:
    """Each head through its own matrix.

    Sequences take one product per row and head: with rows merged, the bits of XLA's CPU product
    depend on their number. Single tokens are merged, for a copy of the weights per row costs more.
    """
    weight = weight.astype(x.dtype)
    if x.shape[1] == 1:
        return jnp.einsum("rlha,hab->rlhb", x, weight)
    weight = jnp.broadcast_to(weight, (x.shape[0], *weight.shape))
    return jnp.einsum("rhla,rhab->rhlb", x.swapaxes(1, 2), weight).swapaxes(1, 2)
