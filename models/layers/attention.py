"""[P] Grouped-query attention with rotary positions (arXiv 2305.13245).

Against the cache a KV head is a token cache of its own, (value | rotated key) of every token.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from models.layers.context import Rows, Step
from models.layers.norm import RMSNorm, exact
from models.layers.parameters import matrix, parameter
from models.layers.projection import project
from models.layers.rope import Rotation, rotate
from rl_jax.arrays import Array, Tree
from rl_jax.kernels.mla import api as mla
from rl_jax.model import TokenCache


class GroupedQueryAttention(nnx.Module):
    """`heads` queries, of which heads / kv_heads side by side share a key and a value.

    `qk_norm` norms queries and keys per head before they are turned; `bias` adds biases to queries,
    keys and values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        qk_norm: bool,
        bias: bool,
        eps: float,
        out_gain: float,
        rngs: nnx.Rngs,
    ):
        kv_axis = "kv_heads" if kv_heads > 1 else None  # a single one is in every tensor rank
        own, shared = ("heads", None), (kv_axis, None)
        self.query = matrix(rngs, (width, heads, head_dim), ("embed", *own), width)
        self.key = matrix(rngs, (width, kv_heads, head_dim), ("embed", *shared), width)
        self.value = matrix(rngs, (width, kv_heads, head_dim), ("embed", *shared), width)
        if bias:
            self.query_bias = parameter(jnp.zeros((heads, head_dim)), own)
            self.key_bias = parameter(jnp.zeros((kv_heads, head_dim)), shared)
            self.value_bias = parameter(jnp.zeros((kv_heads, head_dim)), shared)
        if qk_norm:
            self.query_norm, self.key_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)
        self.out = matrix(
            rngs, (heads, head_dim, width), (*own, "embed"), heads * head_dim, out_gain
        )
        self.qk_norm, self.bias, self.scale = qk_norm, bias, head_dim**-0.5

    @staticmethod
    def cache(kv_heads: int, head_dim: int) -> TokenCache:
        """What a sequence keeps of this layer: value | key of every KV head."""
        return TokenCache(2 * head_dim, kv_heads)

    def forward(
        self, x: Float[Array, "R L D"], rows: Rows, turn: Rotation
    ) -> Float[Array, "R L D"]:
        q, k, v = self._operands(x, turn)
        out = mla.attend_heads(q, k, v, rows.segments, scale=self.scale)
        return project(out, self.out[...], 2)

    def extend(
        self, x: Float[Array, "R n D"], step: Step, turn: Rotation, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree]:
        """The cache is in float32, and so is attention to it."""
        q, k, v = self._operands(x, turn)
        kept = exact(jnp.concatenate([v, k], -1))
        place = step.positions, step.n_valid
        pool = step.io.write_tokens(pool, step.pages, layer, *place, kept)
        width = v.shape[-1]
        out = step.io.attend(pool, step.pages, layer, exact(q), *place, width, self.scale)
        return project(out.astype(x.dtype), self.out[...], 2), pool

    def _operands(
        self, x: Array, turn: Rotation
    ) -> tuple[Float[Array, "R L H A"], Float[Array, "R L G A"], Float[Array, "R L G A"]]:
        q, k, v = (project(x, weight[...]) for weight in (self.query, self.key, self.value))
        if self.bias:
            biases = self.query_bias, self.key_bias, self.value_bias
            q, k, v = (a + b[...].astype(a.dtype) for a, b in zip((q, k, v), biases, strict=True))
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate(q, turn), rotate(k, turn), v
